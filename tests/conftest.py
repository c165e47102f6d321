"""Golden files: `assert text == golden` compares with tests/golden/<file>/<test>.txt; --update-golden rewrites them."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the tests print now")


class Golden:
    """Equal to a text when that is what its file holds; on --update-golden it takes the text over."""

    def __init__(self, path: Path, update: bool) -> None:
        self.path, self.update = path, update

    def __eq__(self, text: object) -> bool:
        if not isinstance(text, str):
            return NotImplemented
        if self.update:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text)
        if not self.path.exists():
            pytest.fail(f"{self.path} is missing: run with --update-golden", pytrace=False)
        return self.path.read_text() == text

    def __repr__(self) -> str:
        return self.path.read_text() if self.path.exists() else f"<missing {self.path}>"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    path = Path(__file__).parent / "golden" / request.path.stem / f"{request.node.name}.txt"
    return Golden(path, request.config.getoption("--update-golden"))
