#!/usr/bin/env bash
# One deployment on two machines, started by hand: router and prefill node on the first, decode node on the second.
# The machines are two network namespaces joined by a virtual cable, so one computer will do. Needs root, iproute2, curl.
#
#     sudo env PATH="$PATH" examples/two_machines.sh [MODEL]
#
# On real machines leave out `on_one` and `on_two`, give each machine its own address, and copy the key to both.
set -euo pipefail

model=${1:-}                         # a checkpoint folder; empty: the demo model
one=baton-one-$$ two=baton-two-$$    # names of the namespaces
folder=$(mktemp -d)
programs=()

on_one() { ip netns exec "$one" "$@"; }
on_two() { ip netns exec "$two" "$@"; }

clean_up() {
    status=$?
    # what it started ends first, by its number: SIGTERM lets requests finish
    kill "${programs[@]}" 2>/dev/null || true
    wait || true
    ip netns del "$one" 2>/dev/null || true
    ip netns del "$two" 2>/dev/null || true
    if [ $status -ne 0 ]; then tail -n 5 "$folder"/*.log >&2 || true; fi
    rm -rf "$folder"
    exit $status
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# Two machines with a cable between them. The kernel takes the cable away with the namespaces.
ip netns add "$one"
ip netns add "$two"
ip link add v1 netns "$one" type veth peer name v2 netns "$two"
on_one ip addr add 10.88.0.1/24 dev v1
on_two ip addr add 10.88.0.2/24 dev v2
on_one ip link set lo up
on_two ip link set lo up
on_one ip link set v1 up
on_two ip link set v2 up

# Beyond loopback every program needs the same key. KV over zmq is encrypted by it.
baton key "$folder/cluster.key" >/dev/null

# HTTP stays on the first machine's loopback; nodes dial the control port. The last flag is for this trial: a decode node
# would compute so short a prompt itself.
on_one baton router $model --served-model-name trial --local-prefill-tokens 0 --port 8000 --control-host 10.88.0.1 --control-port 8001 \
    --cluster-key "$folder/cluster.key" 2>"$folder/router.log" >"$folder/router.out" &
programs+=($!)
on_one baton prefill $model --router tcp://10.88.0.1:8001 --host 10.88.0.1 \
    --cluster-key "$folder/cluster.key" --kv-transport zmq 2>"$folder/prefill.log" >"$folder/prefill.out" &
programs+=($!)
on_two baton decode $model --router tcp://10.88.0.1:8001 --host 10.88.0.2 \
    --cluster-key "$folder/cluster.key" --kv-transport zmq 2>"$folder/decode.log" >"$folder/decode.out" &
programs+=($!)

# /ready says yes once there is a decode node. Each start loads the model, so this takes a while.
for try in $(seq 240 -1 0); do
    [ "$try" -gt 0 ] || { echo "not ready after two minutes" >&2; exit 1; }
    kill -0 "${programs[@]}" || { echo "a program has ended" >&2; exit 1; }
    if on_one curl -sf http://127.0.0.1:8000/ready >/dev/null &&
        on_one curl -s http://127.0.0.1:8000/metrics | grep -q '^baton:nodes.*role="prefill"} 1'; then
        break
    fi
    sleep 0.5
done

on_one curl -sf http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
    -d '{"model": "trial", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}' | tee "$folder/answer"
echo
grep -q '"finish_reason"' "$folder/answer"
# The prompt was computed on the first machine, and its KV handed to the second.
on_one curl -s http://127.0.0.1:8000/metrics | grep '^baton:relay_handoff_attempts_total [1-9]'
