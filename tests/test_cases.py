"""User cases under zinf_compile against plain PyTorch in another process, at the smallest budget and halfway to plain's peak.

Every case is a file in tests/cases (README there). The cases of `MUST_HOLD` run in `make test`, the rest in `make test-slow`.
Two cases run at a time, ahead of the test that asks for them.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.cases.harness import CASES, MUST_HOLD, CaseRunner, Row


def params(names):
    return [pytest.param(n, marks=() if n in MUST_HOLD else pytest.mark.slow, id=CASES[n].stem) for n in names]


WITH_SCENARIO = [n for n, path in CASES.items() if "\ndef scenario" in path.read_text()]


@pytest.fixture(scope="module")
def results(request):
    """(test function, case) -> Future of rows, for every test selected in this module, two at a time in collection order."""
    work = {"test_case": lambda r: r.runs(["min", "half"]), "test_scenarios": lambda r: [r.scenario(i) for i in range(r.num_scenarios())]}
    wanted = [(item.originalname, item.callspec.params["name"]) for item in request.session.items if item.path == request.path]
    runners = {name: CaseRunner(name) for _, name in wanted}
    with ThreadPoolExecutor(2) as pool:
        futures: dict[tuple[str, str], Future[list[Row]]] = {key: pool.submit(work[key[0]], runners[key[1]]) for key in wanted}
        yield futures
        for future in futures.values():
            future.cancel()


def check(rows: list[Row]) -> None:
    wrong = [r for r in rows if r.status == "wrong"]
    assert not wrong, "\n".join(f"case {r.case}, {r.run}, budget {r.budget}: {r.note}" for r in wrong)
    refused = [r for r in rows if r.status == "refused"]
    if refused:
        pytest.xfail(f"refused, as this case's description allows: {refused[0].note}")


@pytest.mark.parametrize("name", params(CASES))
def test_case(name, results):
    check(results["test_case", name].result())


@pytest.mark.parametrize("name", params(WITH_SCENARIO))
def test_scenarios(name, results):
    check(results["test_scenarios", name].result())
