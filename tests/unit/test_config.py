import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pyps.cli.main import app
from pyps.config import (
    OTHER_VARIABLES,
    ConfigError,
    ExitCondition,
    ServerConfig,
    StopCondition,
    flag_name,
    resolve,
    variable_name,
)
from pyps.launcher.environment import worker_environment
from pyps_client.launch import Launch


def made(flags=None, environment=None, toml_path=None, warnings=None):
    warn = (warnings if warnings is not None else []).append
    return resolve(flags or {}, environment or {}, toml_path, warn=warn)


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "pyps.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_flag_wins_over_environment_over_toml_over_default(toml):
    path = toml("port = 1\ncontrol_port = 2\nmetrics_port = 3\n")
    environment = {"PYPS_PORT": "11", "PYPS_CONTROL_PORT": "12"}
    config = made({"port": "21"}, environment, path)
    assert (config.port, config.control_port, config.metrics_port, config.max_workers) == (21, 12, 3, 256)


def test_every_field_can_be_set_by_flag_by_environment_and_by_toml(toml):
    texts = {
        "protocol": "softsync:n=2",
        "warmup": "updates=20,protocol=serial",
        "bounds": "learning_rate_max=1",
        "schedule": "step:every=100,factor=0.5",
        "batch_growth": "start=8,maximum=64,every=2,epoch_examples=1000",
        "stop_after": "updates=5",
        "exit_when": "gone,idle=5",
        "optimizer": "sgd:learning_rate=0.5",
        "staleness": "none",
        "log_format": "json",
        "standby_of": "host:7610",
        "log_level": "debug",
        "durability": "none",
        "lane_port": "7777",
    }
    for field in dataclasses.fields(ServerConfig):
        if isinstance(field.default, bool):
            text = "true"
        elif isinstance(field.default, int | float):
            text = str(field.default + 10)
        else:
            text = texts.get(field.name, f"/{field.name}")
        needs = {"resume": ["checkpoint_dir"], "log_gradients": ["update_log"], "start_together": ["expected_workers"]}
        needs |= {"observer_token_file": ["token_file"], "operator_token_file": ["token_file"]}
        needs |= {"tls_cert": ["tls_key"], "tls_key": ["tls_cert"], "tls_client_ca": ["tls_cert", "tls_key"]}
        others = {name: "2" if name == "expected_workers" else f"/{name}" for name in needs.get(field.name, ())}
        by_flag = made({field.name: text, **others})
        by_environment = made(others, {f"PYPS_{field.name.upper()}": text})
        bare = isinstance(field.default, int | float)
        by_toml = made(others, {}, toml(f"{field.name} = {text if bare else repr(text)}\n"))
        assert getattr(by_flag, field.name) != field.default
        assert by_flag == by_environment == by_toml


def test_help_shows_every_flag_whole_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    assert max(map(len, shown.splitlines())) <= 80
    words = shown.replace(";", " ").replace("]", " ").replace(",", " ").split()
    for field in dataclasses.fields(ServerConfig):
        assert flag_name(field.name) in words
        assert variable_name(field.name) in words
    in_one_line = " ".join(shown.split())
    assert "How pushes become updates, as async, softsync:n=4,merge=senders, hardsync:" in in_one_line
    assert "one. [default: 7610; env: PYPS_PORT]" in in_one_line
    assert in_one_line.count("[default: ") == len(dataclasses.fields(ServerConfig))


def test_a_mode_named_after_a_source_takes_gradients_in_full_unless_a_policy_is_given():
    brought = {
        **dict.fromkeys(("downpour", "asynchronous", "asgd", "asgd:mutex=shard", "ssp:s=3", " Downpour "), "none"),
        **dict.fromkeys(("async", "softsync:n=4", "4-softsync", "hardsync", "serial"), "divide"),
    }
    assert {name: made({"protocol": name}).behaviour.staleness.text for name in brought} == brought
    assert made().behaviour.staleness.text == "divide"
    for policy in ("divide", "hinge:a=2"):
        assert made({"protocol": "downpour", "staleness": policy}).behaviour.staleness.text == policy


BAD_VALUES = [
    ({"port": "x"}, {}, ["the flag --port", "'x'", "whole number"]),
    ({"port": "65536"}, {}, ["the flag --port", "65536", "from 0 to 65535"]),
    ({}, {"PYPS_PORT": "1.5"}, ["PYPS_PORT in the environment", "'1.5'", "whole number"]),
    ({}, {"PYPS_INSECURE": "perhaps"}, ["PYPS_INSECURE", "'perhaps'", "true or false"]),
    ({"lease_seconds": "nan"}, {}, ["--lease-seconds", "nan", "at least"]),
    ({"max_workers": "0"}, {}, ["--max-workers", "0", "from 1 to 100000"]),
    ({"log_format": "xml"}, {}, ["--log-format", "'xml'", "text, json"]),
    ({"stop_after": "updates=-1"}, {}, ["--stop-after", "'updates=-1'", "updates=N"]),
    ({"stop_after": "seconds=inf"}, {}, ["--stop-after", "seconds=N"]),
    ({"stop_after": "updates=5", "protocol": " Sandblaster"}, {}, ["--stop-after", "'updates=5'", "--iterations"]),
    ({"exit_when": "done"}, {}, ["--exit-when", "'done'", "never, gone, finished", "idle=SECONDS"]),
    *(
        ({}, {"PYPS_EXIT_WHEN": text}, ["PYPS_EXIT_WHEN", repr(text)])
        for text in ("idle", "idle=0", "idle=nan", "idle=inf", "idle=5,gone", "gone,", "gone,finished", "never,idle=5")
    ),
    ({"resume": True}, {}, ["--resume", "--checkpoint-dir"]),
    ({"log_gradients": True}, {}, ["--log-gradients", "--update-log"]),
    ({"start_together": True}, {}, ["--start-together", "--expected-workers"]),
    ({"heartbeat_seconds": "40"}, {}, ["30 s", "40 s", "lease_seconds", "--heartbeat-seconds"]),
    ({"port": "7611"}, {}, ["7611", "differ"]),
    ({}, {"PYPS_OPTIMIZER": "sgd:learning_rate=fast"}, ["PYPS_OPTIMIZER", "learning_rate", "'fast'"]),
    ({}, {"PYPS_STALENESS": "nonsense"}, ["PYPS_STALENESS", "'nonsense'", "divide", "polynomial"]),
    ({"protocol": "nonsense"}, {}, ["--protocol", "'nonsense'", "async", "hardsync", "softsync"]),
    (
        {"protocol": "backup:b=4", "expected_workers": "4"},
        {},
        ["--protocol", "backup:b=4", "waits for none of 4 workers"],
    ),
    ({"warmup": "updates=20,protocol=async"}, {}, ["--warmup", "'async'", "serial or hardsync"]),
    ({"schedule": "step:every=1,factor=0.5,unit=epochs"}, {}, ["--schedule", "--epoch-examples"]),
    ({"batch_growth": "start=8,maximum=64"}, {}, ["--batch-growth", "--epoch-examples"]),
    ({"protocol": "hardsync", "warmup": "updates=5,release_every=3"}, {}, ["--warmup", "release_every", "hardsync"]),
    ({"clip_norm": "inf"}, {}, ["--clip-norm", "inf", "from 0 to"]),
    ({"protocol": "sandblaster", "warmup": "updates=5"}, {}, ["--warmup", "sandblaster", "nobody pushes"]),
    ({"bounds": "rate=1"}, {}, ["--bounds", "'rate=1'", "learning_rate_max="]),
    ({"bounds": "momentum_max=nan"}, {}, ["--bounds", "momentum_max is nan", "at least 0"]),
    ({"bounds": "learning_rate_max=1,learning_rate_min=2"}, {}, ["--bounds", "learning_rate_min is 2"]),
    ({"bounds": "learning_rate_max=1", "optimizer": "sgd:learning_rate=5"}, {}, ["--bounds", "learning_rate is 5"]),
]


def test_a_bad_value_is_refused_in_one_sentence_that_names_its_origin():
    for flags, environment, words in BAD_VALUES:
        with pytest.raises(ConfigError) as caught:
            pytest.fail(f"{made(flags, environment)} of {flags} and {environment}")
        assert "\n" not in str(caught.value)
        for word in words:
            assert word in str(caught.value), (flags, environment)


def test_a_bad_file_is_refused_with_its_name(toml):
    for text, words in [
        ("zzz = 1", ["zzz", "the settings are host, port"]),
        ("port = true", ["port in ", "True", "whole number"]),
        ("port = 'a", ["no valid TOML"]),
        ("run_id = 5", ["run_id in ", "5", "a text"]),
    ]:
        path = toml(text)
        with pytest.raises(ConfigError) as caught:
            pytest.fail(f"{made({}, {}, path)} of {text}")
        for word in [str(path), *words]:
            assert word in str(caught.value), text


@pytest.mark.parametrize(
    ("variable", "value", "warning"),
    [
        ("PYPS_PORT", "tcp://10.0.0.1:7610", "PYPS_PORT=tcp://10.0.0.1:7610 is ignored"),
        ("PYPS_STALENES", "none", "PYPS_STALENES in the environment is no setting and is ignored"),
    ],
)
def test_a_value_of_kubernetes_and_an_unknown_variable_are_ignored_with_a_warning(variable, value, warning):
    warnings: list[str] = []
    assert made({}, {variable: value, "STALENES": "none"}, warnings=warnings) == ServerConfig()
    [line] = warnings
    assert line.startswith(warning)


def test_an_empty_variable_is_unset():
    assert made({}, {"PYPS_PORT": "", "PYPS_TOKEN_FILE": ""}) == ServerConfig()


def test_other_variables_of_pyps_are_left_alone():
    kubernetes = {
        "PYPS_SERVICE_HOST": "10.0.0.1",
        "PYPS_SERVICE_PORT": "7610",
        "PYPS_SERVICE_PORT_DATA": "7610",
        "PYPS_PORT_7610_TCP": "tcp://x",
        "PYPS_PORT_7610_TCP_ADDR": "10.0.0.1",
        "PYPS_SERVERS_PORT": "tcp://x",
        "PYPS_SERVERS_SERVICE_HOST": "10.0.0.1",
    }
    warnings: list[str] = []
    others = dict.fromkeys(OTHER_VARIABLES, "avx2")
    assert made({}, {**others, **kubernetes}, warnings=warnings) == ServerConfig()
    assert warnings == []


def test_every_variable_of_a_worker_is_known():
    of_both = {"PYPS_RUN_ID", "PYPS_TOKEN", "PYPS_TLS_CERT", "PYPS_TLS_KEY", "PYPS_TOKEN_FILE"}
    assert {f"PYPS_{name.upper()}" for name in Launch._names()} - of_both < set(OTHER_VARIABLES)
    variables = worker_environment({}, index=0, count=1, data_addresses=["a:1"], control_addresses=["a:2"], run_id="r")
    of_pyps = {name for name in variables if name.startswith("PYPS_")}
    assert of_pyps - {"PYPS_RUN_ID"} < set(OTHER_VARIABLES)


def test_behaviour_is_made_of_all_its_settings():
    flags = {
        "protocol": "softsync:n=2",
        "warmup": "updates=20,protocol=hardsync",
        "staleness": "polynomial:a=1",
        "schedule": "step:every=2,factor=0.5,unit=epochs",
        "epoch_examples": "100",
        "batch_growth": "start=8,maximum=64",
        "clip_norm": "2.5",
    }
    behaviour = made(flags).behaviour
    assert behaviour.aggregation.at(0).name == "hardsync"
    assert behaviour.aggregation.at(20).text == "softsync:n=2"
    assert (behaviour.staleness.text, behaviour.clip_norm) == ("polynomial:a=1", 2.5)
    assert behaviour.schedule.factor(0, 400) == 0.25
    assert behaviour.batch_growth.size(200) == 16


def test_conditions_to_stop_and_to_exit_are_read():
    assert made({"stop_after": "examples=50000"}).stop_condition == StopCondition("examples", 50_000)
    assert made({"stop_after": "seconds=0.5"}).stop_condition == StopCondition("seconds", 0.5)
    assert made().stop_condition is None
    for text, condition in [
        ("never", ExitCondition()),
        ("gone", ExitCondition("gone")),
        ("idle=0.5", ExitCondition(idle_seconds=0.5)),
        ("finished,idle=300.0", ExitCondition("finished", 300)),
    ]:
        assert made({"exit_when": text}).exit_condition == condition
