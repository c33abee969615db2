from model_store.conformal.calibration import Calibration
from model_store.conformal.detectors import flag_statistic
from model_store.conformal.rank_tables import ConformalPValues


def find_p_values(calibration: Calibration, scores, labels, num_draws, groups=None):
    """Compute p-values from scores and labels, ranked within categories if there are any."""
    surprisals = calibration.compute_surprisals(scores, labels, num_draws)
    categories = groups
    if groups is None and calibration.categories is not None:
        categories = calibration.categories.assign(labels)
    statistic = flag_statistic(surprisals, calibration.names.combined)
    p_values: ConformalPValues = calibration.rank_tables[num_draws].p_values(
        statistic, surprisals, categories
    )
    return p_values
