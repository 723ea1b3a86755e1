"""What containers are made and started with fits the code and fits together."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.config import load_config
from muster.supervise.plan import FIVE, plan
from services.sandbox.adapters.native.seccomp import DENIED

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
# Making a box takes these; the sandbox's own container may call them, boxes may not.
KEEPERS = {"mount", "umount2", "pivot_root", "setns", "mount_setattr"}
PORTS = {"router": 7400, "inference": 7401, "sandbox": 7402, "readybank": 7403, "trainer": 7404}


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    return found


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8")))


def pods() -> dict[str, dict[str, Any]]:
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in manifests()
        if one["kind"] in ("Deployment", "StatefulSet")
    }


def test_the_settings_of_containers_are_settings(tmp_path: Path) -> None:
    inside = [one["data"]["muster.toml"] for one in manifests() if one["kind"] == "ConfigMap"]
    for number, text in enumerate([(DEPLOY / "compose.toml").read_text("utf-8"), *inside]):
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        config = load_config(file, {})
        told = {role: getattr(config.sections[role], "listen", "") for role in FIVE}
        assert told == {role: f"0.0.0.0:{PORTS[role]}" for role in FIVE}


def test_health_is_asked_where_a_service_listens_and_by_its_name(tmp_path: Path) -> None:
    names = {s.kind: s.health for s in plan(load_config(None, {}), tmp_path) if s.health}
    services = compose()["services"]
    for role in FIVE:
        *_, address, name = services[role]["healthcheck"]["test"]
        assert (address, name) == (f"127.0.0.1:{PORTS[role]}", names[role])
    for role in FIVE:
        [container] = pods()[f"muster-{role}"]["containers"]
        probe = container.get("readinessProbe", container.get("startupProbe"))["grpc"]
        assert (probe["port"], probe["service"]) == (PORTS[role], names[role])


def test_the_first_service_that_starts_from_an_image_makes_it() -> None:
    """Else `docker-compose up` of 1.29 on a new checkout asks a registry for muster:base."""
    made: set[str] = set()
    for name, service in compose()["services"].items():
        if "build" in service:
            made.add(service["image"])
        assert name == "redis" or service["image"] in made, name


@pytest.mark.parametrize("role", FIVE)
def test_a_service_has_no_more_rights_than_it_needs(role: str) -> None:
    service = compose()["services"][role]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["mem_limit"]
    assert service["restart"] == "unless-stopped"
    root = "user" in service
    assert (root, "cap_add" in service) == (role == "sandbox", role == "sandbox")
    assert "privileged" not in service


def test_boxes_stand_apart_from_the_state_of_the_run() -> None:
    mounted = [volume.partition(":")[0] for volume in compose()["services"]["sandbox"]["volumes"]]
    assert not {"state", "models", "redis"} & set(mounted)


def test_both_ways_of_starting_boxes_give_the_same_capabilities() -> None:
    [container] = pods()["muster-sandbox"]["containers"]
    added = container["securityContext"]["capabilities"]["add"]
    assert sorted(added) == sorted(compose()["services"]["sandbox"]["cap_add"])


def test_the_keepers_filter_denies_all_that_boxes_are_denied_but_what_makes_them() -> None:
    profile = json.loads((DEPLOY / "seccomp-sandbox.json").read_text("utf-8"))
    [rule] = profile["syscalls"]
    assert rule["action"] == "SCMP_ACT_ERRNO"
    assert set(rule["names"]) == set(DENIED) - KEEPERS


def test_commands_inside_read_what_the_services_read() -> None:
    """A setting here would stand above SETTINGS, and above the file that the services read."""
    client = compose()["services"]["client"]
    [named] = client["environment"]
    assert named.partition("=")[0] == "MUSTER_CONFIG"
    assert named.partition("=")[2] in compose()["services"]["router"]["command"]


def test_variables_are_told_in_the_file_of_variables() -> None:
    used = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text("utf-8")))
    told = set(re.findall(r"^#?(\w+)=", (ROOT / ".env").read_text("utf-8"), re.MULTILINE))
    builds = {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "TORCH_INDEX", "SECCOMP"}
    assert used - builds == told - {"COMPOSE_PROFILES"}
    # Exported, a name like a setting's would be refused by every command.
    assert not {name for name in used if name.startswith("MUSTER_")}


def test_pods_get_no_variables_that_look_like_settings() -> None:
    links = {name: spec.get("enableServiceLinks") for name, spec in pods().items()}
    assert {name for name, link in links.items() if link is not False} == {"muster-redis"}


def test_a_build_installs_what_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "requirements.py"), "cpu"], capture_output=True, text=True
    )
    told = done.stdout.splitlines()
    extras = project["optional-dependencies"]
    own = [line for line in extras["cpu"] if not line.startswith("muster-rl")]
    assert sorted(told) == sorted([*project["dependencies"], *own, *extras["server"]])
