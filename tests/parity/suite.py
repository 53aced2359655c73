# SPDX-License-Identifier: Apache-2.0
"""Runs many cases on one device, a few at a time, and records the results at the end.

Environment: `PARITY_JOBS`, the number of concurrent cases; `PARITY_RECORD=1` records
the results.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.parity import results
from tests.parity.cases import Case
from tests.parity.comparison import Compared
from tests.parity.processes import CaseFailed, prove

Outcome = tuple[Compared, dict[int, tuple[str, ...]]]


class Suite:
    """Running cases; a test waits for its own."""

    def __init__(self, cases: Sequence[Case], device: str) -> None:
        self.device = device
        self._forms = {case: case.on(device) for case in cases}
        self._pool = ThreadPoolExecutor(int(os.environ.get("PARITY_JOBS", "2")))
        self._in_flight: dict[Case, Future[Outcome]] = {
            case: self._pool.submit(prove, form, device)
            for case, form in self._forms.items()
            if self.obstacle(case) is None
        }

    def obstacle(self, case: Case) -> str | None:
        """The reason why upstream itself cannot run the case on this device."""
        return case.obstacle(self.device)

    def result(self, case: Case) -> Outcome:
        """The result of a case.

        Raises:
            CaseFailed: its process ended without a result.
        """
        if reason := self.obstacle(case):
            pytest.skip(reason)
        return self._in_flight[case].result()

    def close(self) -> None:
        """Cancel cases that have not started; record the others if requested."""
        self._pool.shutdown(cancel_futures=True)
        if os.environ.get("PARITY_RECORD") == "1":
            found = {form: self._entry(case) for case, form in self._forms.items()}
            results.record(found, self.device)

    def _entry(self, case: Case) -> results.Entry:
        if reason := self.obstacle(case):
            return results.failure(reason)
        future = self._in_flight[case]
        if future.cancelled():
            return results.failure("the run was broken off")
        # The others are recorded even if one case raised.
        error = future.exception()
        if isinstance(error, CaseFailed):
            return results.failure(error.summary)
        if error is not None:
            return results.failure(f"{type(error).__name__}: {error}")
        return results.outcome(self._forms[case], *future.result())
