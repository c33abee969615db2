"""The mathematics: outputs[k, n] = f(x[n], theta(eps[k])), without recipes and without a store.

Read in this order:

* `posterior`: theta as a function of noise, and KL(q || p). A module for each family: `gaussian`,
  `matrix_normal`, `hypernetwork` (with `flows`), `variational_hypernet`, `dropout`, `members`,
  `laplace`.
* `layers`: layers that read their part of theta. `network`: f, and a model with its likelihood.
* `likelihoods`: p(y | outputs). `objectives`: the loss of a step.
* `diagnostics`: whether a fit has converged, and how well it covers the exact posterior.
"""
