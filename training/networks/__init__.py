"""Networks, posteriors, flows and likelihoods: `outputs[k, n] = f(x[n], theta(eps[k]))`."""
