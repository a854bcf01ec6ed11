#!/bin/sh
# Runs once, while the image is built.
set -e
echo "node $(node --version), npm $(npm --version)"
npm ci --ignore-scripts
