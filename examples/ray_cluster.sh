#!/usr/bin/env bash
# A deployment that Ray places and Baton scales, on a Ray cluster of this machine alone. Needs `pip install 'baton-serve[ray]'`.
#
#     examples/ray_cluster.sh
#
# On several machines: `ray start --head` on the first, the line that it prints on the others, listen = "machine" in the file.
set -euo pipefail

file=$(dirname "$0")/cluster.toml    # one router, 1 to 2 prefill nodes, 1 to 3 decode nodes, and the goals they are scaled by
export RAY_ADDRESS=127.0.0.1:6399
head=

clean_up() {
    status=$?
    baton cluster down --timeout-s 30 || true
    # with --block this process is the head, and everything of it ends with it; `ray stop` would end other clusters, too
    [ -z "$head" ] || { kill "$head" && wait "$head"; } 2>/dev/null || true
    exit $status
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# Each router and node takes one CPU in the file, so the head offers six whatever this machine has.
ray start --head --block --node-ip-address 127.0.0.1 --port 6399 --num-cpus 6 --include-dashboard false \
    --disable-usage-stats >/dev/null 2>&1 &
head=$!
until ray status >/dev/null 2>&1; do
    kill -0 "$head" || { echo "Ray does not start" >&2; exit 1; }
    sleep 0.5
done

baton cluster up "$file"             # comes back when everything is ready
baton cluster status
curl -sf http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"model": "baton-demo", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}' |
    grep --color=never Paris
