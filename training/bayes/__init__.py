"""Bayesian neural networks: outputs[k, n] = f(x[n], theta(eps[k])).

* `posterior`: theta as a function of noise, and KL(q || p). Each family has a module: `gaussian`,
  `matrix_normal`, `hypernetwork` (with `flows`), `variational_hypernet`, `dropout`, `members` and
  `laplace`.
* `layers`: layers that read their parameters from theta.
* `network`: f, and the model with its likelihood.
* `likelihoods`: p(y | outputs).
* `linalg`: eigenvectors.
* `diagnostics`: convergence of a fit, and importance ratios to the exact posterior.
"""
