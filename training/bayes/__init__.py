"""The mathematics: layers, flows, posteriors, likelihoods and objectives."""
