"""Share a preflight process between fits."""

from typing import Any

from model_store.inference.preflight import Failure, PreflightProcess


class SharedPreflight:
    """A `PreflightProcess` that is reused until a version fails."""

    _process: PreflightProcess | None = None

    def run(self, *args: Any, **kwargs: Any) -> Failure | None:
        if self._process is None:
            SharedPreflight._process = PreflightProcess()
        assert self._process is not None
        failure = self._process.run(*args, **kwargs)
        if failure is not None:
            self.end()
        return failure

    def close(self) -> None:
        """Do nothing; the next fit reuses the process."""

    @classmethod
    def end(cls) -> None:
        if cls._process is not None:
            cls._process.close()
        cls._process = None
