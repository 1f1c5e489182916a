package restart

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// The server of these tests has three addresses that come and go: routes of this network namespace.
// The client has one address for all of them, because the duplicate request cache of a server
// compares the address of the client.
const (
	serverNet  = "10.77.0."
	clientAddr = "198.51.100.7"
)

// A routes changes the routes to the addresses of the server.
type routes struct{ t *testing.T }

func (r routes) run(args ...string) {
	r.t.Helper()
	mounts.Run(r.t, "", "ip", args...)
}

// up makes address n of the server reachable.
func (r routes) up(n int) {
	r.t.Helper()
	r.run("route", "add", "local", serverNet+fmt.Sprint(n), "dev", "lo", "src", clientAddr)
}

// down makes address n disappear without a message to the client.
func (r routes) down(n int) {
	r.t.Helper()
	r.run("route", "del", "local", serverNet+fmt.Sprint(n), "dev", "lo", "table", "local")
}

// lose sends all packets to address n into a network without hosts.
func (r routes) lose(n int) {
	r.t.Helper()
	r.run("route", "add", serverNet+fmt.Sprint(n), "dev", "d0")
	r.down(n)
}

// find undoes lose.
func (r routes) find(n int) {
	r.t.Helper()
	r.up(n)
	r.run("route", "del", serverNet+fmt.Sprint(n), "dev", "d0")
}

// everywhere serves a directory on all addresses of the network namespace.
func everywhere(t *testing.T) *export {
	t.Helper()
	s := mounts.ServeDirAt(t, fmt.Sprint("0.0.0.0:", kit.FreePort(t).Port()),
		fmt.Sprint("0.0.0.0:", kit.FreePort(t).Port()), memoryDir(t), "--no-root-squash")
	return &export{dir: s.Dir, source: "127.0.0.1:/",
		options: []string{"port=" + mounts.PortOf(t, s.RDMA), "mountport=" + mounts.PortOf(t, s.TCP)}}
}

// waitAddresses waits until all connections of the mount are at the given addresses of the server,
// and then until more calls are answered.
func (r *rig) waitAddresses(when string, want ...int) {
	r.t.Helper()
	kit.Succeeds(r.t, "connections "+when, func() error {
		l := r.status().Addresses
		if len(l) == 0 {
			return fmt.Errorf("no connections")
		}
		for _, c := range l {
			at := slices.ContainsFunc(want, func(n int) bool {
				return strings.HasPrefix(c.Address, serverNet+fmt.Sprint(n)+":")
			})
			if !at || c.State != "connected" {
				return fmt.Errorf("got %+v, want connected to %v", l, want)
			}
		}
		return nil
	})
	before := r.status().Metrics.Count("rpc_receives_total")
	kit.Succeeds(r.t, "replies "+when, func() error {
		if n := r.status().Metrics.Count("rpc_receives_total"); n < before+200 {
			return fmt.Errorf("got %d replies after %d", n, before)
		}
		return nil
	})
}

// TestServerAddressesComeAndGo takes addresses of the server away and gives them back while a
// program works on the mount. It also kills the daemon while addresses are gone. No call may fail
// or be executed twice, and no data may be lost. At the end each connection returns to its address.
func TestServerAddressesComeAndGo(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	net := routes{t}
	for n := range 3 {
		net.up(n + 1)
	}
	x := everywhere(t)
	x.options = append(x.options, "nconnect=4", "remoteports="+serverNet+"1-"+serverNet+"3", "keepalive=1")
	r := newRig(t, x)
	r.checkPreferred()
	seed := rand.Uint64()
	t.Log("seed:", seed)
	w := startWorker(t, r.dir)
	w.do("ok", "load %d %s tree append mkdir rename unlinked list sync", seed, x.dir)

	r.waitAddresses("with all addresses", 1, 2, 3)
	net.down(1) // connection attempts fail at once
	net.lose(2) // connection attempts have no answer
	r.waitAddresses("without addresses 1 and 2", 3)
	r.kill(syscall.SIGKILL)
	r.start()
	r.waitState(control.StateMounted)
	r.waitAddresses("after a restart without addresses 1 and 2", 3)
	net.up(1)
	net.find(2)

	sums := endLoads(t, []*worker{w})
	w.kill()
	checkSums(t, x.dir, sums)
	r.checkPreferred()
	r.unmount()
}

// checkPreferred waits until the connections are spread over the addresses of the server in turn.
func (r *rig) checkPreferred() {
	r.t.Helper()
	kit.Succeeds(r.t, "connections to the preferred addresses", func() error {
		l := r.status().Addresses
		for i, c := range l {
			want := fmt.Sprint(serverNet, i%3+1, ":")
			if c.State != "connected" || c.Address != c.Preferred || !strings.HasPrefix(c.Address, want) {
				return fmt.Errorf("got %+v", l)
			}
		}
		return nil
	})
}

// TestOtherServerAtAddress lists an address of another server. The mount must be refused, and no
// connection must be left.
func TestOtherServerAtAddress(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	net := routes{t}
	net.up(1)
	net.up(2)
	x, s := embedded(t)
	at := func(n int, addr string) string { return serverNet + fmt.Sprint(n) + ":" + mounts.PortOf(t, addr) }
	other := mounts.ServeDirAt(t, at(1, s.RDMA), at(1, s.TCP), memoryDir(t), "--no-root-squash")
	r := newRig(t, x, "remoteports=127.0.0.1")
	dir := mounts.OpenTempDir(t)
	mount := func(ports string) []string {
		return []string{"mount", x.source, dir, "-o", strings.Join(append(x.options, "remoteports="+ports), ",")}
	}
	r.refused(mount("127.0.0.1~"+serverNet+"1"), serverNet+"1 has another file handle for / than 127.0.0.1",
		"list addresses of one server")
	r.refused(mount(serverNet+"1"), serverNet+"1 has another file handle")
	other.End(t, syscall.SIGTERM)
	// An address without an answer is only logged.
	r.cli(mount(serverNet + "1~" + serverNet + "2~127.0.0.1")...)
	if got, err := filepath.Glob(dir + "/*"); err != nil || len(got) != 0 {
		t.Errorf("directory: got %v, %v", got, err)
	}
	if log := r.daemon.Out.String(); strings.Count(log, "does not answer MOUNT at an address of remoteports") != 2 {
		t.Errorf("log: got %s, want two warnings", log)
	}
	r.cli("umount", dir)
	r.cli("umount", r.dir)
	r.end(0)
}
