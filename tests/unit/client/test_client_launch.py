import tomllib
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import pyps_client
from pyps.service import server
from pyps_client import launch
from pyps_client.launch import Launch, parse_servers
from pyps_wire.errors import InvalidArgument
from support import ROOT

SGD = ("sgd", {"learning_rate": 0.1})


def test_everything_comes_from_the_environment(tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text("secret-token\n", encoding="utf-8")
    environment = {
        "PYPS_SERVERS": "a:1, b:2",
        "PYPS_RUN_ID": "digits",
        "PYPS_WORKER_INDEX": "2",
        "PYPS_WORKER_COUNT": "4",
        "PYPS_TOKEN_FILE": str(token_file),
        "PYPS_START_WAIT_SECONDS": "7.5",
        "PYPS_WAIT_SECONDS": "90",
        "PYPS_USE_PROXY": "yes",
    }

    launch = Launch(environment=environment)

    assert launch == Launch(
        servers=("a:1", "b:2"),
        run_id="digits",
        worker_id="worker-2",
        worker_index=2,
        worker_count=4,
        token="secret-token",
        token_file=str(token_file),
        start_wait_seconds=7.5,
        wait_seconds=90.0,
        use_proxy=True,
    )


ARGUMENTS: dict[str, tuple[Any, str]] = {
    "run_id": ("mine", "theirs"),
    "worker_id": ("mine", "theirs"),
    "worker_index": (1, "two"),
    "worker_count": (3, "four"),
    "parts": (2, "both"),
    "start_wait_seconds": (1.0, "soon"),
    "loss_wait_seconds": (1.0, "soon"),
    "wait_seconds": (1.0, "soon"),
    "use_proxy": (False, "maybe"),
    "gradient_codec": ("float16", "float8"),
    "parameter_codec": ("float16", "float8"),
    "transport": ("grpc", "carrier pigeon"),
    "tls_ca": ("mine", "theirs"),
    "tls_cert": ("mine", "theirs"),
    "tls_key": ("mine", "theirs"),
    "token": ("mine", "gehe\u00efm"),
    "worker_key": ("mine, which is long", "short"),
    "resend_bytes_max": (7, "much"),
    "shard_size": (7, "large"),
}


def test_every_argument_goes_before_its_variable_which_is_not_even_read_unless_it_is_none():
    theirs = {"PYPS_SERVERS": "a:1", "PYPS_RUN_ID": "theirs", "PYPS_WORKER_ID": "w"}
    launch = Launch("b:2", environment=theirs, run_id="mine", worker_id=None)
    assert (launch.servers, launch.run_id, launch.worker_id) == (("b:2",), "mine", "w")
    environment = {f"PYPS_{name.upper()}": theirs for name, (_, theirs) in ARGUMENTS.items()}
    environment |= {"PYPS_SERVERS": "no address", "PYPS_TOKEN_FILE": "/nowhere/token"}
    arguments = {name: mine for name, (mine, _) in ARGUMENTS.items()}

    launch = Launch("b:2", environment=environment, **arguments)

    assert launch.servers == ("b:2",)
    assert {name: getattr(launch, name) for name in arguments} == arguments
    assert {each.name for each in fields(Launch) if each.init} == {"servers", "token_file", *ARGUMENTS}


def test_a_token_file_that_is_named_goes_before_both_variables(tmp_path):
    path = tmp_path / "token"
    path.write_text("mine\nformer\n", encoding="utf-8")
    environment = {"PYPS_TOKEN_FILE": "/nowhere/token", "PYPS_TOKEN": "theirs"}
    assert Launch("b:2", token_file=path, environment=environment).token == "mine"


def test_rank_and_world_size_are_a_workers_place_under_torchrun_where_nobody_named_the_worker():
    ranks = {"PYPS_SERVERS": "a:1", "RANK": "3", "WORLD_SIZE": "8"}
    torchrun = ranks | {"TORCHELASTIC_RUN_ID": "none"}
    for environment, place in (
        (ranks, (None, None)),
        (torchrun, (3, 8)),
        (torchrun | {"WORLD_SIZE": "1", "RANK": "0"}, (None, None)),
        # The processes of a replica, which are one worker.
        (torchrun | {"PYPS_WORKER_ID": "replica"}, (None, None)),
        (torchrun | {"PYPS_WORKER_INDEX": "0", "PYPS_WORKER_COUNT": "2"}, (0, 2)),
    ):
        launch = Launch(environment=environment)
        assert (launch.worker_index, launch.worker_count) == place, environment
    # Several torchruns may train in one run.
    assert Launch(environment=torchrun).worker_id == Launch(servers=("a:1",)).worker_id


def test_the_job_of_torchrun_names_the_run_where_nobody_else_does(caplog):
    environment = {"PYPS_SERVERS": "a:1", "TORCHELASTIC_RUN_ID": "digits"}
    assert Launch(environment=environment).run_id == "digits"
    assert Launch(environment=environment | {"PYPS_RUN_ID": "mine"}).run_id == "mine"
    assert Launch(environment=environment, run_id="ours").run_id == "ours"
    # An empty name is a choice too.
    assert Launch(environment=environment | {"PYPS_RUN_ID": "mine"}, run_id="").run_id == ""
    assert not caplog.messages
    launch._warn_of_no_name.cache_clear()
    for _ in range(2):
        assert Launch(environment=environment | {"TORCHELASTIC_RUN_ID": "none"}).run_id == ""
    assert "give torchrun --rdzv-id NAME, or set PYPS_RUN_ID" in caplog.text
    assert len(caplog.messages) == 1


def test_the_token_is_not_printed_nor_is_the_key():
    secrets = {"token": "secret", "worker_key": "secret of a worker"}
    assert "secret" not in repr(Launch(servers=("a:1",), **secrets))


def test_addresses_are_read_or_refused_by_name():
    for given, parsed in (
        ("host", ("host:7610",)),
        ("host:80,other:81,", ("host:80", "other:81")),
        (["[::1]:7610"], ("[::1]:7610",)),
    ):
        assert parse_servers(given) == parsed
    for servers, complaint in (
        ("", "No servers were named"),
        ("http://host:7610", "'http://host:7610' is malformed: expected host:port"),
        ("host:port", "'host:port' is malformed"),
        ("host:70000", "has port 70000; expected 1 to 65535"),
        ("::1", "'::1' is malformed"),
        ("a:1,b:2,a:1", "a:1 is listed twice"),
        ({"a:1": 1}, "servers is {'a:1': 1}; expected 'host:port,host:port'"),
        ("a:1, local", "'local', a server that a worker starts for itself alone"),
    ):
        with pytest.raises(InvalidArgument, match=complaint):
            parse_servers(servers)


WRONG = [
    ("PYPS_WORKER_INDEX", "two", "PYPS_WORKER_INDEX is 'two'; expected a whole number"),
    ("PYPS_WORKER_INDEX", "4", "worker_index is 4 of 4 workers; expected 0 to 3"),
    ("PYPS_WORKER_INDEX", "-1", "is -1; expected 0 or more"),
    ("PYPS_START_WAIT_SECONDS", "-1", "start_wait_seconds is -1.0"),
    ("PYPS_LOSS_WAIT_SECONDS", "nan", "loss_wait_seconds is nan"),
    ("PYPS_WAIT_SECONDS", "-5", "wait_seconds is -5.0; expected a number of seconds, 0 or more"),
    ("PYPS_USE_PROXY", "maybe", "PYPS_USE_PROXY is 'maybe'; expected yes or no"),
    ("PYPS_TOKEN_FILE", "/nowhere/token", "/nowhere/token cannot be read: No such file"),
    ("PYPS_GRADIENT_CODEC", "int3", r"PYPS_GRADIENT_CODEC\) is 'int3'; expected one of float32, .*, topk2bit$"),
    ("PYPS_SHARD_SIZE", "0", r"shard_size \(PYPS_SHARD_SIZE\) is 0; expected 1 or more"),
    ("PYPS_TRANSPORT", "shmem", f"PYPS_TRANSPORT is 'shmem'; expected one of {', '.join(launch.TRANSPORTS)}"),
]


def test_a_value_of_another_type_than_its_settings_is_refused_by_name():
    for given, complaint in (
        ({"loss_wait_seconds": "x"}, "loss_wait_seconds is 'x'; expected a number"),
        ({"start_wait_seconds": True}, "start_wait_seconds is True; expected a number"),
        ({"worker_id": 5}, "worker_id is 5; expected a string"),
        ({"run_id": 3}, "run_id is 3; expected a string"),
        ({"worker_index": "1"}, "worker_index is '1'; expected a whole number, or None"),
        ({"parts": 1.5}, "parts is 1.5; expected a whole number"),
        ({"use_proxy": "no"}, "use_proxy is 'no'; expected True or False"),
        ({"transport": 5}, "transport is 5; expected a string"),
        ({"transport": "rdma"}, "transport is 'rdma'; expected one of auto, shm, tcp, grpc"),
        ({"gradient_codec": 5}, "gradient_codec is 5; expected a string"),
        ({"parameter_codec": "topk:ratio=0.1"}, "parameter_codec .* is 'topk'; expected .* int8, int4, delta$"),
        ({"parameter_codec": "onebit"}, "parameter_codec .* is 'onebit'; expected one of float32, float16, bfloat16"),
        ({"gradient_codec": "delta"}, "gradient_codec .* is 'delta'; expected .* onebit, threshold, topk, topk2bit$"),
        (
            {"gradient_codec": "int4", "transport": "shm"},
            "gradient_codec .* is 'int4', which shared memory.* to 'auto'",
        ),
        ({"gradient_codec": "topk:tau=1"}, "the setting of topk is 'tau=1'; expected ratio="),
        ({"shard_size": "x"}, "shard_size is 'x'; expected a whole number"),
        ({"token_file": 5}, "token_file is 5; expected a string"),
        # Which is not printed.
        ({"worker_key": "a" * 15}, r"worker_key \(PYPS_WORKER_KEY\) has 15 characters; expected 16 to 64"),
        ({"token": 7}, "token is of type int; expected a string"),
        ({"token": "first\nsecond"}, "token does not hold one line of printable ASCII"),
        *(({"servers": wrong}, "expected 'host:port,host:port', or a list of") for wrong in (5, [5], b"a:1")),
    ):
        with pytest.raises(InvalidArgument, match=complaint):
            Launch(**{"servers": "a:1"} | given)
    # Numbers are numbers, whoever made them.
    assert Launch(servers=["a:1"], worker_index=np.int64(1), wait_seconds=np.float32(2)).worker_id == "worker-1"


def test_an_empty_name_goes_before_its_variable_and_leaves_the_worker_unnamed():
    theirs = {"PYPS_SERVERS": "a:1", "PYPS_WORKER_ID": "w", "PYPS_WORKER_INDEX": "3"}
    assert Launch(environment=theirs, worker_id="").worker_id == "worker-3"


def test_a_wrong_variable_is_refused_by_name():
    for variable, text, complaint in WRONG:
        environment = {"PYPS_SERVERS": "a:1", "PYPS_WORKER_COUNT": "4", variable: text}
        with pytest.raises(InvalidArgument, match=complaint):
            Launch(environment=environment)


def test_a_worker_may_choose_each_transport_that_servers_have():
    assert {transport.name for transport in server.TRANSPORTS} == set(launch.TRANSPORTS) - {"auto"}


def test_a_token_that_cannot_be_sent_is_refused(tmp_path):
    path = tmp_path / "token"
    for text in ("gehe\u00efm", "a\x1bb"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidArgument, match="one line of printable ASCII"):
            Launch("localhost", token_file=path, environment={})


def test_the_clients_version_is_that_of_its_release():
    project = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert pyps_client.__version__ == project["version"]


def test_wrong_arguments_of_a_client_are_refused_by_name_before_any_connection():
    one = {"w": np.zeros(3, np.float32)}
    for tensors, optimizer, complaint in (
        ("sgd", SGD, "tensors is of type str; expected a dictionary of float32 arrays by their names"),
        ([1, 2], SGD, "tensors is of type list"),
        ({3: one["w"]}, SGD, "tensors is of type dict"),
        ({}, SGD, "No tensors were given"),
        ({"w": np.zeros(3)}, SGD, "Tensor 'w' is float64; servers hold float32"),
        ({"w": "abc"}, SGD, "Tensor 'w' is <U3"),
        ({"w": [[1], [1, 2]]}, SGD, "Tensor 'w' is no array"),
        *(
            (one, wrong, "expected a rule and its settings, as")
            for wrong in ("sgd", {"rule": "sgd"}, ("sgd",), (3, {}))
        ),
        (one, ("sgd", {"learning_rate": "x"}), "expected a rule and its settings, as"),
    ):
        with pytest.raises(pyps_client.ConfigurationError, match=complaint):
            pyps_client.Client(tensors, optimizer, servers="127.0.0.1:1")
