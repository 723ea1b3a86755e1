"""Which base an image stands for: the longest pattern counts, an unknown one is refused by name."""

from __future__ import annotations

import pytest

from muster.errors import ConfigError, InvalidInput
from services.sandbox.bases import DOCKER, HOST, NATIVE, Bases, BaseSetting, Kind, read

DIGEST = "0" * 63 + "a"


def test_what_is_built_in_is_the_host() -> None:
    settings = read({}, NATIVE)
    assert settings == {
        "muster/host-base": BaseSetting(Kind.HOST),
        "scratch": BaseSetting(Kind.HOST),
    }
    assert Bases().base_for("scratch") == Bases().base_for("muster/host-base:latest") == HOST


def test_an_engine_of_images_knows_no_host() -> None:
    assert read({"ubuntu:*": "image:local/ubuntu"}, DOCKER) == {
        "ubuntu:*": BaseSetting(Kind.IMAGE, "local/ubuntu")
    }


@pytest.mark.parametrize(
    ("value", "setting"),
    [
        ("host", BaseSetting(Kind.HOST)),
        ("/srv/root", BaseSetting(Kind.FOLDER, "/srv/root")),
        ("/srv/bookworm.tar.xz", BaseSetting(Kind.TARBALL, "/srv/bookworm.tar.xz")),
        (f"/srv/b.tgz@sha256:{DIGEST}", BaseSetting(Kind.TARBALL, "/srv/b.tgz", DIGEST)),
        (f"/srv/root@sha256:{DIGEST}", BaseSetting(Kind.FOLDER, "/srv/root", DIGEST)),
    ],
)
def test_a_value_is_read_by_its_form(value: str, setting: BaseSetting) -> None:
    assert read({"any/*": value}, NATIVE)["any/*"] == setting


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        ("ubuntu:*", "image:ubuntu"),  # this backend has no images
        ("ubuntu:*", "image:"),
        ("ubuntu:*", "root"),
        ("ubuntu:*", "Host"),
        ("ubuntu:*", ""),
        ("ubuntu:*", "/srv/root@sha256:abc"),
        ("ubuntu:*", f"/srv/root@{DIGEST}"),
        ("ubuntu:*", "/srv/disk.qcow2"),
        ("ubuntu:*", "/srv/root.tar.zst"),
        ("", "host"),
        ("two words", "host"),
        ("new\nline", "host"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused_with_field_and_value(
    pattern: str, value: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read({pattern: value}, NATIVE)
    assert caught.value.field == f'sandbox.bases."{pattern}"'
    assert caught.value.value == value
    assert caught.value.way_out


NAMES = {"*": "any", "ubuntu*": "ubuntu", "ubuntu:24.04": "noble", "ubuntu:2?.04": "some"}


@pytest.mark.parametrize(
    ("image", "base"),
    [
        ("ubuntu:24.04", "noble"),
        ("docker.io/library/ubuntu:24.04", "noble"),
        ("ubuntu:22.04", "some"),
        ("ubuntu", "ubuntu"),
        ("ubuntu:latest", "ubuntu"),
        ("registry.example/ubuntu:24.04", "any"),
        (f"ubuntu@sha256:{DIGEST}", "ubuntu"),
        ("Ubuntu:24.04", "any"),
    ],
)
def test_the_longest_pattern_that_fits_counts(image: str, base: str) -> None:
    assert Bases(NAMES).base_for(image) == base
    assert Bases(dict(reversed(NAMES.items()))).base_for(image) == base


def test_latest_in_a_pattern_is_the_plain_name() -> None:
    assert Bases({"python:latest": "py"}).base_for("python") == "py"


def test_of_two_as_long_the_one_with_fewer_wildcards_counts() -> None:
    names = {"ab*c": "one", "a**c": "two", "abxc": "exact"}
    assert Bases(names).base_for("abxc") == "exact"
    assert Bases(names).base_for("abyc") == "one"


def test_an_unknown_image_is_refused_with_what_is_known_and_the_way_out() -> None:
    with pytest.raises(InvalidInput) as caught:
        Bases().base_for("nixos/nix:2.18")
    assert caught.value.field == "environment/Dockerfile FROM"
    assert caught.value.value == "nixos/nix:2.18"
    assert "muster/host-base, scratch" in caught.value.problem
    assert 'sandbox.bases."nixos/nix:2.18"' in caught.value.way_out
