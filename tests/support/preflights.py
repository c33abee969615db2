"""A process for the preflights of many fits: starting one takes longer than a preflight."""

from typing import Any

from model_store.inference.preflight_process import Failure, PreflightProcess


class KeptPreflight:
    """In place of `PreflightProcess`: one process goes on until a version fails in it."""

    _process: PreflightProcess | None = None

    def run(self, *args: Any, **kwargs: Any) -> Failure | None:
        if self._process is None:
            KeptPreflight._process = PreflightProcess()
        assert self._process is not None
        failure = self._process.run(*args, **kwargs)
        if failure is not None:
            self.end()
        return failure

    def close(self) -> None:
        """The next fit uses the process too."""

    @classmethod
    def end(cls) -> None:
        if cls._process is not None:
            cls._process.close()
        cls._process = None
