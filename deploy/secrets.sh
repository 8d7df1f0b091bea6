#!/usr/bin/env bash
# What deploy/compose.yaml reads, made where it is missing: secrets.sh FOLDER. As root: each file becomes its reader's.
set -euo pipefail
folder=${1:?usage: secrets.sh FOLDER}
mkdir -p "$folder" && chmod 0711 "$folder" && cd "$folder"
umask 077
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
owned() { chmod 0600 "$1"; if [ "$(id -u)" = 0 ]; then chown "$2" "$1"; fi; }

[ -s bus-password ] || random >bus-password
if [ ! -s nats.conf ]; then
  cat >nats.conf <<END
listen: 0.0.0.0:4222
http: 127.0.0.1:8222
jetstream { store_dir: /data }
authorization { user: tether, password: "$(cat bus-password)" }
END
fi
if [ ! -s http-tokens.json ]; then
  token=$(random)
  printf '[{"token": "%s", "tenant": "default", "name": "operator"}]\n' "$token" >http-tokens.json
  printf 'the token for HTTP: %s\n' "$token"
fi
if [ ! -s agents.toml ]; then
  cat >agents.toml <<'END'
# Commands are paths inside a sandbox; TETHER_AGENTS_DIR of this host is /opt/tether/agents there.
# [agents.claude]
# command = ["/opt/tether/agents/claude"]
# env = { ANTHROPIC_API_KEY = "…" }
END
fi
owned nats.conf 0:0
for file in bus-password http-tokens.json agents.toml; do owned "$file" 65532:65532; done
