#!/usr/bin/env bash
# The four arms of docs/worldcycle.md on the mini world: base, WorldCompass, + spatial, + spatial + temporal.
# Seeds are paired: all arms of a seed draw the same prompts and noise. Started again it goes on where it stopped.
#
#   bash experiments/cycle-arms.sh [seeds] [epochs] [folder]
set -euo pipefail
seeds=${1:-3} epochs=${2:-30} folder=${3:-runs/cycle}
last=$(printf "e%03d" "$epochs")
declare -A found

for seed in $(seq "$seeds"); do
  for arm in compass spatial both; do
    params=experiments/cycle-$arm.yaml root=$folder/$arm-$seed
    wcpipe run --params "$params" --set seed="$seed" --epochs "$epochs" --root "$root" --keep last:1
    wcpipe evaluate --suite cyclebench --params "$params" --set seed="$seed" --epoch "$last" --root "$root"
    found[$arm]="${found[$arm]:+${found[$arm]},}$root/evaluation/cyclebench-$last.json"
  done
done

base=$folder/compass-1
wcpipe evaluate --suite cyclebench --params experiments/cycle-compass.yaml --set seed=1 --epoch e000 --root "$base"
for control in render static slow blurred palindrome random; do
  wcpipe evaluate --suite cyclebench --params experiments/cycle-compass.yaml --control "$control" --root "$base"
done
wcpipe report --suite cyclebench --root "$base" --arm "compass=${found[compass]}" --arm "spatial=${found[spatial]}" \
  --arm "both=${found[both]}" --arm "base=$base/evaluation/cyclebench-e000.json"
