"""Every flag, setting, path and port of docs/deploy exists, and its parts fit together.

``make check-deploy`` validates the files by their schemas.
"""

import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

pytest.importorskip("vllm")

import yaml
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_router.launch_router import parse_router_args

from kvferry.cli.main import app
from kvferry.errors import SettingsError
from kvferry.handoff.wire.trust import Keys, make_keys
from kvferry.integrations.vllm import failed_loads, readiness
from kvferry.integrations.vllm.plugin import CONNECTORS
from kvferry.integrations.vllm.settings import Settings, parse_settings

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
MODULE = ["-m", "vllm.entrypoints.openai.api_server"]
POD_IP, HOST = "10.2.0.7", "10.1.0.11"
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
PORTS = {"prefill": 8100, "decode": 8200}


def unit(kind: str) -> dict[str, list[str]]:
    """Return the settings of a systemd unit, each with all its values."""
    text = (DEPLOY / "systemd" / f"kvferry-{kind}.service").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if re.match(r"\w+=", line):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def words(line: str, variables_of: str) -> list[str]:
    """Return a unit's command as systemd runs it, with the variables of an environment file."""
    variables = dict(
        each.split("=", 1)
        for each in (DEPLOY / "systemd" / f"{variables_of}.env").read_text().splitlines()
        if "=" in each and not each.startswith("#")
    )
    found = []
    for word in shlex.split(line.removeprefix("-")):
        if word.startswith("$") and not word.startswith("${"):
            found += variables[word[1:]].split()
        else:
            found.append(re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], word))
    return found


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"])


def manifests(kind: str) -> dict[str, Any]:
    """Return the Kubernetes objects of a file by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes" / f"{kind}.yaml").read_text())}


def pod(kind: str) -> dict[str, Any]:
    found = manifests(kind)
    return dict((found.get("StatefulSet") or found["Deployment"])["spec"]["template"]["spec"])


def engine_command(place: str, kind: str) -> list[str]:
    """Return how an engine is started, with every variable replaced."""
    if place == "systemd":
        return words(unit(kind)["ExecStart"][0], "engine")
    if place == "compose":
        return list(compose()[kind]["command"])
    [container] = pod(kind)["containers"]
    command = [*container["command"], *container["args"]]
    return [word.replace("$(POD_IP)", POD_IP) for word in command]


def drain_command(place: str, kind: str) -> tuple[list[str], float]:
    """Return how an engine is drained before it ends, and the seconds that it gets."""
    if place == "systemd":
        return words(unit(kind)["ExecStop"][0], "engine"), float(unit(kind)["TimeoutStopSec"][0])
    if place == "compose":
        service = compose()[kind]
        return service["pre_stop"][0]["command"], float(service["stop_grace_period"].removesuffix("s"))
    found = pod(kind)
    shell = found["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert shell[:2] == ["sh", "-c"]
    return shlex.split(shell[2].replace("$POD_IP", POD_IP)), float(found["terminationGracePeriodSeconds"])


def router_command(place: str) -> list[str]:
    if place == "systemd":
        return words(unit("router")["ExecStart"][0], "router")
    if place == "compose":
        return list(compose()["router"]["command"])
    [container] = pod("router")["containers"]
    return [*container["command"], *container["args"]]


def parsed(command: Sequence[str]) -> Any:
    """Return the arguments of an engine as vLLM reads them, which ends at a flag that it does not have."""
    assert command[1:3] == MODULE
    return make_arg_parser(FlexibleArgumentParser(allow_abbrev=False)).parse_args(list(command[3:]))


def settings_of(arguments: Any) -> tuple[dict[str, Any], Any]:
    config = arguments.kv_transfer_config
    config = json.loads(config) if isinstance(config, str) else config
    described = config if isinstance(config, dict) else vars(config)
    return described, parse_settings(described["kv_connector_extra_config"])


PLACES = ("systemd", "compose", "kubernetes")
for_engines = pytest.mark.parametrize(("place", "kind"), [(place, kind) for place in PLACES for kind in ROLES])


@for_engines
def test_an_engine_is_started_by_flags_and_settings_that_exist(place: str, kind: str) -> None:
    arguments = parsed(engine_command(place, kind))
    described, settings = settings_of(arguments)
    assert described["kv_connector"] in CONNECTORS
    assert described["kv_role"] == ROLES[kind]
    assert arguments.port == PORTS[kind]
    middleware = [readiness.Readiness, *([failed_loads.FailedLoadAnswers] if kind == "decode" else [])]
    assert arguments.middleware == [f"{each.__module__}.{each.__qualname__}" for each in middleware]
    # Other hosts reach it, so it must have keys; a port that is not fixed cannot be drained.
    assert settings.keys
    assert settings.port


@for_engines
def test_an_engine_is_drained_where_it_listens_and_gets_the_time_for_it(place: str, kind: str) -> None:
    command, seconds = drain_command(place, kind)
    given = kvferry_arguments(command)
    _, settings = settings_of(parsed(engine_command(place, kind)))
    assert given["engine"] == f"{settings.host}:{settings.port}"
    assert str(given["keys"]) == settings.keys
    assert given["timeout"] + 30 <= seconds


def kvferry_arguments(command: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a command of kvferry's as typer reads them."""
    program, name, *arguments = command
    assert Path(program).name == "kvferry"
    group = typer.main.get_command(app)
    found = group.get_command(typer.Context(group), name)  # type: ignore[attr-defined]
    return dict(found.make_context(name, list(arguments)).params)


def test_the_health_checks_of_compose_ask_the_engines() -> None:
    for kind in ROLES:
        test = compose()[kind]["healthcheck"]["test"]
        assert test[0] == "CMD"
        _, settings = settings_of(parsed(engine_command("compose", kind)))
        assert kvferry_arguments(test[1:])["engine"] == f"{settings.host}:{settings.port}"
        assert settings.host == compose()[kind]["hostname"]


def pairs_checked(script: str) -> list[tuple[str, str]]:
    """Return the URLs of each pair that a script checks, which runs here with a `kvferry` that notes its arguments.

    The first question of each pair finds no answer yet.
    """
    stand_in = 'kvferry() { echo "$@"; again=$((1 - ${again:-0})); [ $again = 0 ] || return 2; }; sleep() { :; }; '
    ran = subprocess.run(["sh", "-c", stand_in + script], capture_output=True, text=True, check=True, timeout=60)
    asked = [kvferry_arguments(["kvferry", *line.split()]) for line in ran.stdout.splitlines()]
    assert asked[::2] == asked[1::2]
    assert {str(each["keys"]) for each in asked} == {"/etc/kvferry/keys"}
    stand_in = "kvferry() { return 1; }; sleep() { :; }; "
    assert subprocess.run(["sh", "-c", stand_in + script], check=False, timeout=60).returncode == 1
    return [(each["prefill_url"], each["decode_url"]) for each in asked[::2]]


def test_a_prompt_goes_through_every_pair_before_clients_do() -> None:
    services = compose()
    *shell, script = services["check"]["command"]
    assert shell == ["sh", "-c"]
    router = parse_router_args(router_command("compose")[1:])
    assert pairs_checked(script.replace("$$", "$")) == [(router.prefill_urls[0][0], router.decode_urls[0])]
    assert services["router"]["depends_on"]["check"] == {"condition": "service_completed_successfully"}
    assert services["check"]["depends_on"] == {kind: {"condition": "service_healthy"} for kind in ROLES}

    job, policy = manifests("check")["Job"]["spec"]["template"], manifests("check")["NetworkPolicy"]["spec"]
    [container] = job["spec"]["containers"]
    *shell, script = container["command"]
    assert shell == ["sh", "-c"]
    router = parse_router_args(router_command("kubernetes")[1:])
    urls = [url for url, *_ in router.prefill_urls], router.decode_urls
    assert pairs_checked(script) == list(itertools.product(*urls))
    for kind in ROLES:
        assert job["spec"]["volumes"] == [volume for volume in pod(kind)["volumes"] if volume["name"] == "keys"]
        _, settings = settings_of(parsed(engine_command("kubernetes", kind)))
        asked = {*PORTS.values(), settings.port, *settings.ports_of_ranks}
        labels = manifests(kind)["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        assert admitted(policy, job["metadata"]["labels"]) == asked


@pytest.mark.parametrize("place", PLACES)
def test_the_router_asks_readiness_of_engines_that_exist(place: str) -> None:
    command = router_command(place)
    assert Path(command[0]).name == "vllm-router"
    arguments = parse_router_args(command[1:])
    assert arguments.vllm_pd_disaggregation
    assert arguments.health_check_endpoint == readiness.PATH
    prefills = [url for url, *_ in arguments.prefill_urls]
    urls = {"prefill": prefills, "decode": list(arguments.decode_urls)}
    for kind, port in PORTS.items():
        if place == "systemd":
            expected = None
        elif place == "compose":
            expected = [f"http://{kind}:{port}"]
        else:
            name, count = f"kvferry-{kind}", manifests(kind)["StatefulSet"]["spec"]["replicas"]
            expected = [f"http://{name}-{index}.{name}:{port}" for index in range(count)]
        assert urls[kind]
        assert urls[kind] == (expected or urls[kind])
        assert all(url.endswith(f":{port}") for url in urls[kind])


@pytest.mark.parametrize("kind", ROLES)
def test_kubernetes_asks_what_kvferry_and_vllm_answer(kind: str) -> None:
    [container] = pod(kind)["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    _, settings = settings_of(parsed(engine_command("kubernetes", kind)))
    assert ports == {"http": PORTS[kind], "control": settings.port}
    paths = {probe: container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")}
    assert {probe: found["path"] for probe, found in paths.items()} == {
        "startup": "/health",
        "readiness": readiness.PATH,
        "liveness": "/health",
    }
    assert {found["port"] for found in paths.values()} == {"http"}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) <= {volume["name"] for volume in pod(kind)["volumes"]}
    assert settings.keys in mounts
    spec = manifests(kind)["StatefulSet"]["spec"]
    assert spec["serviceName"] == manifests(kind)["Service"]["metadata"]["name"]
    assert manifests(kind)["Service"]["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()


UCX_PORTS = "UCX_TCP_PORT_RANGE"
MOST_RANKS = 16
"""More ranks than one host has devices."""


def ports_between_engines(settings: Settings, environment: Mapping[str, str]) -> dict[str, range]:
    """Return each end point on which other engines reach an engine of one data-parallel rank, with its ports."""
    assert settings.port, "a firewall cannot admit a free port"
    assert settings.rank_ports, "a firewall cannot admit the free ports of ranks"
    assert settings.transport in ("auto", "nixl"), "the test does not know the ports of other transports"
    first, _, last = environment[UCX_PORTS].partition("-")
    found = {
        "control": range(settings.port, settings.port + 1),
        "ranks": settings.ports_of_ranks,
        "nixl": range(int(first), int(last) + 1),
    }
    assert len(found["ranks"]) >= MOST_RANKS
    assert sum(map(len, found.values())) == len(set().union(*found.values())), "two end points may take the same port"
    return found


@pytest.mark.parametrize("kind", ROLES)
def test_every_port_of_an_engine_is_admitted_from_those_that_connect_and_from_nobody_else(kind: str) -> None:
    [container] = pod(kind)["containers"]
    _, settings = settings_of(parsed(engine_command("kubernetes", kind)))
    environment = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    policy = manifests("router")["NetworkPolicy"]["spec"]
    labels = manifests(kind)["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    router_labels = manifests("router")["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    between = ports_between_engines(settings, environment)
    assert admitted(policy, labels) == set().union(*between.values())
    assert admitted(policy, router_labels) == set(PORTS.values())


def admitted(policy: dict[str, Any], labels: Mapping[str, str]) -> set[int]:
    """Return the ports that a policy admits from a pod with these labels."""
    found: set[int] = set()
    for rule in policy["ingress"]:
        if any(each["podSelector"]["matchLabels"].items() <= labels.items() for each in rule["from"]):
            for port in rule["ports"]:
                assert port["protocol"] == "TCP"
                found.update(range(port["port"], port.get("endPort", port["port"]) + 1))
    return found


@pytest.mark.parametrize("kind", ROLES)
def test_the_pages_name_the_ports_of_the_units_and_the_firewalls_that_must_pass_them(kind: str) -> None:
    _, settings = settings_of(parsed(engine_command("systemd", kind)))
    environment = dict(each.split("=", 1) for each in unit(kind)["Environment"])
    between = ports_between_engines(settings, environment)
    page, two_hosts = ((DEPLOY / name).read_text() for name in ("README.md", "../two-hosts.md"))
    [firewall] = re.findall(r"In the firewall: (.*)", page)
    assert f"{PORTS[kind]}" in firewall
    for ports in between.values():
        named = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else f"{ports[0]}"
        assert named in firewall
        assert named in two_hosts.partition("## Ports")[2].partition("##")[0]


def test_the_keys_of_a_secrets_volume_are_accepted(tmp_path: Path) -> None:
    """As kubelet lays them out: links, in a folder of root's to which everybody may add."""
    made, volume = tmp_path / "made", tmp_path / "volume"
    make_keys(made)
    data = volume / "..2026_11_23"
    data.mkdir(parents=True)
    (volume / "..data").symlink_to(data.name)
    for kind in ROLES:
        [source] = [each["secret"] for each in pod(kind)["volumes"] if "secret" in each]
        for name in re.findall(r"--from-file=(\S+)", (DEPLOY / "kubernetes" / f"{kind}.yaml").read_text()):
            (data / name).unlink(missing_ok=True)
            (data / name).write_bytes((made / name).read_bytes())
            (data / name).chmod(source["defaultMode"])
            (volume / name).unlink(missing_ok=True)
            (volume / name).symlink_to(f"..data/{name}")
        volume.chmod(0o1777)
        assert len(Keys(str(volume)).trusted) == 1
        volume.chmod(0o777)
        with pytest.raises(SettingsError):
            Keys(str(volume))
