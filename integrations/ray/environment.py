"""What Ray reads from the environment."""

import os
import secrets


def set_ray_environment(variables: dict[str, str], is_ours: bool) -> None:
    """Set what Ray reads from the environment when it is imported, where it is not set already.

    Args:
        variables: by their names.
        is_ours: whether Ray is started by this process. It then has a token of its own: Ray's ports
            run what they are sent.
    """
    variables = {"RAY_USAGE_STATS_ENABLED": "0", **variables}  # nothing is sent anywhere
    if is_ours and "RAY_AUTH_MODE" not in os.environ:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= variables | os.environ
