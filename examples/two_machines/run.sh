#!/bin/bash
# Two machines tune one problem together through one PostgreSQL server, with one command each.
#
# The machines are two network namespaces of this one, which need root; without it, two processes. Their GPUs are
# simulated: they replay the recording of an H200. Needs Debian's packages postgresql and iproute2.
set -euo pipefail

folder=$(mktemp -d)
programs=$(ls -d /usr/lib/postgresql/*/bin | sort -V | tail -1)
node1=() node2=() as_server=() address=127.0.0.1 port=5499
if [ "$(id -u)" = 0 ]; then
    as_server=(runuser -u postgres --) address=10.231.78.1
    node1=(ip netns exec autotile-node1) node2=(ip netns exec autotile-node2)
fi

end() {
    "${as_server[@]}" "$programs/pg_ctl" -D "$folder/data" -m immediate stop > "$folder/stop.log" 2>&1 || true
    if [ "$(id -u)" = 0 ]; then
        ip netns del autotile-node1 || true
        ip netns del autotile-node2 || true
        ip link del autotile-bridge || true
    fi
    rm -rf "$folder"
}
trap end EXIT

# The network: a switch with two machines, at 10.231.78.2 and 10.231.78.3.
if [ "$(id -u)" = 0 ]; then
    ip link add autotile-bridge type bridge
    ip addr add $address/24 dev autotile-bridge
    ip link set autotile-bridge up
    for number in 1 2; do
        ip netns add autotile-node$number
        ip link add autotile-eth$number type veth peer name eth0 netns autotile-node$number
        ip link set autotile-eth$number master autotile-bridge up
        ip -n autotile-node$number addr add 10.231.78.$((number + 1))/24 dev eth0
        ip -n autotile-node$number link set eth0 up
        ip -n autotile-node$number link set lo up
    done
fi

# The server: a role with a password, and an empty database.
password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
(umask 077; echo "$password" > "$folder/password"; echo "$address:$port:*:tuner:$password" > "$folder/pgpass")
if [ "$(id -u)" = 0 ]; then chown -R postgres "$folder" && chown root "$folder/pgpass"; fi
"${as_server[@]}" "$programs/initdb" -D "$folder/data" -U tuner -A scram-sha-256 --pwfile="$folder/password" > /dev/null
echo "host all all $address/24 scram-sha-256" >> "$folder/data/pg_hba.conf"
"${as_server[@]}" "$programs/pg_ctl" -D "$folder/data" -l "$folder/data/log" -w start > /dev/null \
    -o "-c listen_addresses=$address -c port=$port -c unix_socket_directories="
export PGPASSFILE=$folder/pgpass
"$programs/createdb" -h $address -p $port -U tuner tuning

# One command on each machine, at the same time. The password is in the file that libpq reads, not in the URL.
export AUTOTILE_DB=postgresql://tuner@$address:$port/tuning
command=(autotile tune matmul_tiled M=2048 N=2048 K=2048 --trials 16 --replay)
"${node1[@]}" "${command[@]}" > "$folder/node1" 2>&1 &
first=$!
"${node2[@]}" "${command[@]}" > "$folder/node2" 2>&1 &
second=$!
status=0
wait $first || status=$?
wait $second || status=$?
for node in node1 node2; do
    echo "$node\$ ${command[*]}"
    cat "$folder/$node"
    echo
done
[ $status = 0 ] || exit $status

echo "head\$ autotile list"
autotile list
echo
echo "head\$ psql -c 'SELECT run_id, count(*) ... GROUP BY run_id'"
"$programs/psql" -h $address -p $port -U tuner tuning -c \
    "SELECT run_id, count(*) AS trials, count(DISTINCT config_key) AS configurations
     FROM trials WHERE phase = 'search' GROUP BY GROUPING SETS ((run_id), ()) ORDER BY run_id"
