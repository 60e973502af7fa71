#!/usr/bin/env bash
# Acceptance of Holdfast on a real cluster with JobSet: installs the chart, runs the example job, drains a machine, and says what
# must be seen. Needs kubectl, helm, holdfast, two images, and three machines that take pods of the job (four to see a replacement).
#
#   SERVICES=REGISTRY/services:TAG TRAINER=REGISTRY/trainer:TAG deploy/kubernetes/accept.sh [OPTIONS OF holdfast kubernetes submit]
#
# Without GPUs: add --gpus 0. It works in a namespace of its own (NAMESPACE, default holdfast-accept), which stays for you to look at.
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${SERVICES:?set SERVICES to the image of deploy/Dockerfile, target services}"
: "${TRAINER:?set TRAINER to the image of deploy/Dockerfile, target trainer}"
namespace=${NAMESPACE:-holdfast-accept}
job=accept
work=$(mktemp -d)
drained=""
forward=""

cleanup() {
  if [ -n "$drained" ]; then kubectl uncordon "$drained" || true; fi
  if [ -n "$forward" ]; then kill "$forward" 2> /dev/null || true; fi
  rm -rf "$work"
}
trap cleanup EXIT

must() { printf '\n== %s\n   must be seen: %s\n' "$1" "$2"; }
k() { kubectl --namespace "$namespace" "$@"; }
field() { holdfast jobs show "$job" --json | python3 -c "import json, sys; print(json.load(sys.stdin)[sys.argv[1]])" "$1"; }
until_true() { # description, seconds, command
  local what=$1 until=$((SECONDS + $2))
  shift 2
  until "$@"; do
    if ((SECONDS > until)); then echo "NOT SEEN in time: $what" >&2; exit 1; fi
    sleep 2
  done
  echo "   seen: $what"
}
stepped() { (($(field step) >= $1)); }
moved() { ! k get pods --selector "app.kubernetes.io/instance=$job,app.kubernetes.io/component=agent" \
  --field-selector "spec.nodeName=$1,status.phase=Running" --output name | grep -q .; }

must "JobSet" "its CRD is there"
kubectl get crd jobsets.jobset.x-k8s.io

must "the chart" "supervisors and diagnostics become ready; an upgrade keeps the tokens"
kubectl create namespace "$namespace" --dry-run=client --output yaml | kubectl apply -f -
install() {
  helm upgrade --install holdfast deploy/kubernetes/chart --namespace "$namespace" \
    --set "image.repository=${SERVICES%:*}" --set-string "image.tag=${SERVICES##*:}" --wait --timeout 10m
}
install > /dev/null
before=$(k get secret holdfast-tokens --output 'go-template={{.data}}')
install > /dev/null
[ "$before" = "$(k get secret holdfast-tokens --output 'go-template={{.data}}')" ]
echo "   seen: the tokens were kept"

k port-forward service/holdfast-api 18470:8470 > "$work/forward.log" &
forward=$!
export HOLDFAST_API=http://127.0.0.1:18470
HOLDFAST_API_TOKEN=$(k get secret holdfast-tokens --output 'go-template={{index .data "api-token" | base64decode}}')
export HOLDFAST_API_TOKEN
until_true "the API answers" 60 holdfast health http://127.0.0.1:18470/healthz

must "a job" "two nodes and a spare connect, and the job steps"
cat > "$work/job.yaml" << EOF
name: $job
script: /opt/holdfast/examples/gpt/train.py
args: [--steps, "20000", --layers, "2", --width, "64", --seq, "64", --out, /tmp/gpt]
nodes: 2
nproc_per_node: 1
mesh: {dp: 2}
spares: 1
checkpoint: {interval_steps: 20}
EOF
submit() { holdfast kubernetes submit "$work/job.yaml" --namespace "$namespace" --image "$TRAINER" --memory-tier 512Mi "$@"; }
submit "$@"
submit "$@" | grep 'was submitted already'
until_true "100 steps" 600 stepped 100

must "the launcher is evicted" "the job steps on, and the next launcher says 'attached to $job'"
k delete pod --selector "app.kubernetes.io/instance=$job,app.kubernetes.io/component=launcher" --wait=false
until_true "100 more steps" 300 stepped "$(($(field step) + 100))"

must "a machine is drained" "an incident 'maintenance' with a hot swap; no node is lost; the pod is replaced"
drained=$(holdfast jobs show "$job" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["nodes"][0])')
kubectl drain "$drained" --ignore-daemonsets --delete-emptydir-data --timeout 5m \
  --pod-selector "app.kubernetes.io/instance=$job,app.kubernetes.io/component=agent"
until_true "no agent of the job is left on $drained" 300 moved "$drained"
until_true "100 more steps" 300 stepped "$(($(field step) + 100))"
holdfast incidents list
k get pods --output wide
kubectl uncordon "$drained"
drained=""

must "the end" "the job is stopped with a last save; the launcher's Job fails with 93, and the JobSet with it; agents' pods are deleted"
holdfast jobs stop "$job"
k wait "jobset/$job" --for=condition=Failed --timeout 5m
k get jobset,pods

cat << EOF

All steps were carried out. Look at the incidents above: one 'maintenance', none 'node_lost'. By hand, for what a script should not do:
  - switch a machine of the job off: 'node_lost' and a swap within seconds; its pod is replaced while the old one is Terminating
  - delete the leading supervisor's pod during a swap: the same incident goes on
Remove everything: kubectl delete namespace $namespace
EOF
