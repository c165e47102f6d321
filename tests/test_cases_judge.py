"""The judge of the cases must be able to say no."""

import torch

from tests.cases.compare import CLOSE, DIFFERENT, SAME, compare
from tests.cases.harness import judge, judge_scenario

RUN = {"budget": 100, "moved": 1, "spilled": 0, "graphs": 1, "breaks": 0, "tries": 2, "seconds": 0.1, "io": [0, 0]}


def error(kind, *bases, message="no space in the store"):
    return {"type": kind, "bases": [kind, *bases], "message": message, "where": "x.py:1", "state_saved": True}


def test_compare_tells_same_close_and_different():
    x = torch.arange(4.0)
    nan = torch.tensor([float("nan")])
    assert compare({"a": [x, 1, None]}, {"a": [x.clone(), 1, None]}) == (SAME, "")
    assert compare(nan, nan.clone())[0] == SAME
    assert compare({"a": x}, {"a": x + 1e-7})[0] == CLOSE
    assert compare([x, x + 1e-7], [x, x + 1])[0] == DIFFERENT
    assert compare({"a": x}, {"b": x})[0] == DIFFERENT
    assert compare(x, x.double())[0] == DIFFERENT
    assert compare(x, None)[0] == DIFFERENT
    assert compare([1.0], [1.0, 2.0])[0] == DIFFERENT
    assert compare({"a": 1, "b": 2}, {"b": 2, "a": 1})[0] == DIFFERENT  # the order of a state dict's keys counts
    assert compare(0.5, 0.6) == (DIFFERENT, " 0.5 vs 0.6")


def test_judge_wants_equal_values_and_bytes_moved():
    assert judge("01", {**RUN, "result": 1}, 1, 200, 1e-5).status == SAME
    assert judge("01", {**RUN, "result": 2}, 1, 200, 1e-5).status == "wrong"
    assert judge("01", {**RUN, "result": 1, "moved": 0}, 1, 200, 1e-5).status == "wrong"
    assert judge("01", {**RUN, "result": 1, "moved": 0, "spilled": 9}, 1, 200, 1e-5).status == SAME
    assert judge("01", {**RUN, "result": 1, "moved": 0, "budget": 300}, 1, 200, 1e-5).status == SAME
    assert judge("01", {**RUN, "error": error("Unsupported", "ZinfError")}, 1, 200, 1e-5).status == "wrong"
    assert judge("47", {**RUN, "error": error("Unsupported", "ZinfError")}, 1, 200, 1e-5).status == "refused"
    assert judge("47", {**RUN, "error": error("RuntimeError")}, 1, 200, 1e-5).status == "wrong"


def test_judge_scenario_wants_what_the_case_says(tmp_path):
    def verdict(scenario, **run):
        run = {**RUN, "warnings": [], "files_in_use": [], **run}
        return judge_scenario(scenario, run, 1, 200, 1e-5, tmp_path)[0]

    raises = {"expect": "raises", "mentions": ["store", "space|bytes"]}
    assert verdict(raises, error=error("StoreError", "ZinfError")) == SAME
    assert verdict(raises, error=error("StoreError", "ZinfError", message="store")) == "wrong"
    assert verdict(raises, error=error("SystemError")) == "wrong"
    assert verdict(raises, result=1) == "wrong"
    assert verdict({"expect": "same"}, error=error("StoreError", "ZinfError")) == "wrong"
    assert verdict({"expect": "same"}, result=1) == SAME
    empty = {"expect": "same", "after": "store_dir is empty"}
    assert verdict(empty, result=1, moved=0) == SAME
    assert verdict(empty, result=1) == "wrong"
    assert verdict(empty, result=1, moved=0, files_in_use=["x"]) == "wrong"
    kept = {"expect": "same", "after": "notes.txt still exists"}
    assert verdict(kept, result=1) == "wrong"
    (tmp_path / "notes.txt").touch()
    assert verdict(kept, result=1) == SAME
