#!/usr/bin/env bash
# Runs a command, by which python loads the libraries built with AddressSanitizer, and reports errors
# and leaks of this project's own code: tools/asan.sh FOLDER_FOR_REPORTS COMMAND...
set -euo pipefail
reports=$(mkdir -p "$1" && cd "$1" && pwd)
shift
rm -f "$reports"/*

# python is not instrumented itself, so the run-time library comes first by LD_PRELOAD; libstdc++
# beside it, because C++ exceptions are looked up when the former starts. torch and CPython let the
# process's end free much of what they hold: leaks alone do not make a process fail.
status=0
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS="log_path=$reports/report:abort_on_error=1:allocator_may_return_null=1" \
  LSAN_OPTIONS="exitcode=0" "$@" || status=$?

# An out-of-bounds access or the like, by whomever.
if grep --files-with-matches "ERROR: AddressSanitizer" "$reports"/* >&2 2>/dev/null; then
  grep --no-filename --after-context=40 "ERROR: AddressSanitizer" "$reports"/* >&2
  exit 1
fi

# A leak is ours where a frame of csrc/ allocated without torch in between; torch's tensors are held
# by python, where no leak checker can follow.
leaks=$(cat "$reports"/* 2>/dev/null | awk '
  BEGIN { RS = ""; FS = "\n" }
  {
    for (i = 1; i <= NF && $i !~ /libtorch|libc10/; i++)
      if ($i ~ /\/csrc\/((cpu|host|common)\/)?[a-z_0-9]+\.(h|cpp):/) { print $0 "\n"; break }
  }')
if [ -n "$leaks" ]; then
  echo "$leaks" >&2
  exit 1
fi
exit "$status"
