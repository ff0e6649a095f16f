import re
import subprocess
import textwrap

from support import ROOT

GRPCURL = """#!/bin/sh
printf '%s\\n' "$TOKEN" "$@"
"""


def test_the_observer_s_token_is_no_argument_of_grpcurl(tmp_path):
    text = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
    found = re.search(r"\n  inspect:\n.*?\n      - \|\n(.*?)\n      - grpcurl\n", text, re.S)
    assert found
    script = textwrap.dedent(found[1]).replace("$$", "$").replace("/keys/", f"{tmp_path}/")
    (tmp_path / "observer.token").write_text("secret\n", encoding="utf-8")
    (tmp_path / "grpcurl").write_text(GRPCURL, encoding="utf-8")
    (tmp_path / "grpcurl").chmod(0o700)
    command = ["sh", "-euc", script, "grpcurl", "server-0:7611", "a b"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=20, check=True
    )
    token, *arguments = done.stdout.splitlines()
    assert token == "secret"
    assert not any(token in argument for argument in arguments)
    assert arguments[-5:] == ["-expand-headers", "-H", "authorization: Bearer ${TOKEN}", "server-0:7611", "a b"]
