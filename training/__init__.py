"""The offline half: networks, hypernetworks, fitting, calibration and export."""
