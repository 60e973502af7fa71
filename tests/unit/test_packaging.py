"""What the distribution claims about itself."""

from __future__ import annotations

from pathlib import Path

import holdfast


def test_every_package_of_the_namespace_says_that_it_is_typed() -> None:
    """PEP 561: a marker per package, because `holdfast` itself is a namespace and belongs to nobody."""
    packages = [path for root in holdfast.__path__ for path in Path(root).iterdir() if (path / "__init__.py").exists()]
    assert len(packages) > 10
    assert [path.name for path in packages if not (path / "py.typed").exists()] == []
