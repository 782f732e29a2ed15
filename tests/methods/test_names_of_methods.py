"""Names of methods are those of one method each, whatever is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from methods import mistaken

from rapid.errors import InputError
from rapid.methods import find_method, method_names

OWN = {"rapid", "dpdm", "dp-gan", "dp-diffusion", "dp-classifier"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_package_adds_its_method(site: Path) -> None:
    mistaken.install(site)
    assert set(method_names()) >= OWN | {mistaken.NAME}
    assert find_method(mistaken.NAME) is mistaken.METHOD


def test_a_package_with_the_name_of_one_of_rapids_methods(site: Path) -> None:
    """Neither wins unseen; the other methods are as before."""
    mistaken.install(site, "clash", "dpdm = methods.mistaken:METHOD")
    with pytest.raises(InputError, match="method dpdm: is a method of rapid, and clash would replace it; remove"):
        find_method("dpdm")
    assert find_method("dp-gan").name == "dp-gan"
    assert method_names().count("dpdm") == 1


def test_two_packages_with_one_name(site: Path) -> None:
    for name in ("one", "two"):
        mistaken.install(site, name, f"{mistaken.NAME} = methods.mistaken:METHOD")
    with pytest.raises(InputError, match="method mistaken: is the method of several packages, one and two; remove"):
        find_method(mistaken.NAME)
    assert method_names().count(mistaken.NAME) == 1


def test_one_package_on_two_places_of_the_path(site: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As with an installed package that is also in the working folder: Python takes the first."""
    again = tmp_path_factory.mktemp("again")
    for place in (site, again):
        mistaken.install(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(again)
        assert find_method(mistaken.NAME) is mistaken.METHOD
