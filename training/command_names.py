"""The commands of `python -m training`, and what they do."""

COMMANDS = {
    "inspect": "say what data are taken for, before anything is fitted",
    "fit": "fit a recipe on its data and publish the model",
    "evaluate": "measure a published version, and keep the report with it",
    "compare": "compare two published versions on the same test rows",
    "calibrate": "publish a model again, calibrated on other data",
    "prune": "publish a Bayes by Backprop model without its least certain weights",
    "candidate": "fit a candidate on labels that came to the service, and promote it if it is no "
    "worse",
    "active": "simulate active learning on labelled data: how many labels are needed, and how many "
    "are saved",
    "certify": "hold every method's posterior against exact ones and Hamiltonian Monte Carlo",
    "reproduce": "measure the papers' tables and figures, and write pages of them and ours",
}
