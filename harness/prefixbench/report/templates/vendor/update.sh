#!/bin/sh
# Replaces the vendored Plotly by another release: sh update.sh VERSION. The basic bundle (scatter, bar, pie) is a
# quarter of the full one, so that a whole report stays far below 5 MB.
set -eu
version=${1:?usage: update.sh VERSION, for example 4.1.1}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm pack "plotly.js-basic-dist-min@$version" >/dev/null
tar xzf ./*.tgz
cp package/plotly-basic.min.js "$here/plotly-basic.min.js"
cp package/LICENSE "$here/plotly-basic.LICENSE"
cd "$here"
sha256sum plotly-basic.min.js >SHA256SUMS
