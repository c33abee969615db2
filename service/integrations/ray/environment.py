"""What Ray reads from the environment when it is imported. This module imports nothing of it."""

import os
import secrets


def tell_ray(told: dict[str, str], is_ours: bool) -> None:
    """Set variables that are not set already.

    Args:
        told: variables and their values.
        is_ours: whether Ray is started by this process. It then has a token of its own: Ray's ports
            are open to the network, and run what they are sent.
    """
    told = {"RAY_USAGE_STATS_ENABLED": "0", **told}  # nothing is sent anywhere
    if is_ours and "RAY_AUTH_MODE" not in os.environ:
        told |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= told | os.environ
