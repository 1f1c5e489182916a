# A process of this container keeps the mounts while no daemon runs. The container ends with this
# shell, and the mounts with the container. So this shell starts the next daemon when one has crashed.
pid=
ended=
trap 'ended=1; [ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null' TERM INT
while [ -z "$ended" ]; do
  nfsrdmad daemon "$@" &
  pid=$!
  status=0
  wait "$pid" || status=$?
  while kill -0 "$pid" 2>/dev/null; do # a signal has ended wait
    status=0
    wait "$pid" || status=$?
  done
  pid=
  if [ -n "$ended" ]; then
    exit "$status"
  fi
  echo "the daemon ended with status $status; starting the next one" >&2
  sleep 1
done
