"""Keepalive is matched at both ends: no connection idles long enough to be cut, and no ping is too many."""

from pyps.service import hosting
from pyps_client import channel


def test_both_ends_ping_alike_and_no_client_pings_more_often_than_the_server_allows() -> None:
    client = dict(channel._options(use_proxy=False))
    server = dict(hosting._common_options())

    for option in ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.keepalive_permit_without_calls"):
        assert client[option] == server[option]
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"] == 60_000
