#!/bin/sh
# Serve a bundle at a socket of its own and stream a completion of PROMPT from it: serve_demo.sh BUNDLE PROMPT
set -eu
folder=$(mktemp -d)
"${BIN:-.venv/bin}/specbuild" serve "$1" --uds "$folder/socket" 2>"$folder/log" &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server || true; rm -rf "$folder"' EXIT
"${BIN:-.venv/bin}/python" - "$folder/socket" "$2" <<'PYTHON'
import http.client, json, socket, sys, time

path, prompt = sys.argv[1:]
connection = http.client.HTTPConnection("localhost")
for _ in range(600):
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(path)
        break
    except OSError:
        time.sleep(0.1)
body = {"prompt": prompt, "max_tokens": 96, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
print(prompt, end="", flush=True)
for line in connection.getresponse():
    told = json.loads(line[6:]) if line.startswith(b"data: {") else {}
    for choice in told.get("choices", []):
        print(choice["text"], end="", flush=True)
    if told.get("metrics"):
        stats = told["metrics"]["speculative_decoding"]
        print(f"\n[{told['usage']['completion_tokens']} tokens, {stats['mean_acceptance_length']:.2f} a round that drafted]")
PYTHON
