"""Environment variables used by Ray."""

import os
import secrets


def set_ray_environment(variables: dict[str, str], is_local: bool) -> None:
    """Set environment variables that are not yet set. Call this before importing Ray.

    Args:
        variables: values by name.
        is_local: whether this process starts Ray. Ray then requires a new token, because its ports
            execute the code that they receive.
    """
    variables = {"RAY_USAGE_STATS_ENABLED": "0", **variables}
    if is_local and "RAY_AUTH_MODE" not in os.environ:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= variables | os.environ
