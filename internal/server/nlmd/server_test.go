package nlmd

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

var (
	one = netip.MustParseAddr("192.0.2.1")
	two = netip.MustParseAddr("192.0.2.2")
)

func newServer(stateFile string, grace time.Duration) *Server {
	return New(Config{StateFile: stateFile, Grace: grace, Check: func(_ *sunrpc.CallHeader, fh *nfs3.FH) nlmwire.Stat {
		if string(fh.Bytes()) == "stale" {
			return nlmwire.StaleFH
		}
		return nlmwire.Granted
	}})
}

func region(caller string, svid uint32, start, end uint64) nlmwire.Region {
	r := nlmwire.Region{Caller: caller, FH: []byte("file"), OH: []byte{1}, SVID: svid}
	r.SetRange(start, end)
	return r
}

// call executes one call of NLM and returns the status.
func call(t *testing.T, s *Server, peer netip.Addr, proc nlmwire.Proc, a nlmwire.Args) nlmwire.Res {
	t.Helper()
	h := sunrpc.CallHeader{XID: 7, Prog: nlmwire.Program, Vers: nlmwire.Version, Proc: uint32(proc)}
	_, results, err := sunrpc.ParseReply(s.ServeNLM(peer, &h, nlmwire.AppendArgs(nil, proc, &a), nil))
	var res nlmwire.Res
	if err == nil {
		err = nlmwire.ParseRes(proc, results, &res)
	}
	if err != nil {
		t.Fatalf("%v: %v", proc, err)
	}
	return res
}

func wantStat(t *testing.T, s *Server, peer netip.Addr, proc nlmwire.Proc, a nlmwire.Args, want nlmwire.Stat) {
	t.Helper()
	if res := call(t, s, peer, proc, a); res.Stat != want {
		t.Errorf("%v of %v, %+v: got %v, want %v", proc, peer, a.Region, res.Stat, want)
	}
}

func TestLockStates(t *testing.T) {
	s := newServer("", 0)
	mine := nlmwire.Args{Exclusive: true, Region: region("a", 1, 0, 9)}
	other := nlmwire.Args{Exclusive: true, Region: region("a", 1, 5, 5)}
	wantStat(t, s, one, nlmwire.ProcLock, mine, nlmwire.Granted)
	wantStat(t, s, one, nlmwire.ProcLock, mine, nlmwire.Granted) // sent again
	wantStat(t, s, two, nlmwire.ProcLock, other, nlmwire.Denied) // another address is another owner
	wantStat(t, s, two, nlmwire.ProcTest, other, nlmwire.Denied)
	blocked := other
	blocked.Block = true
	wantStat(t, s, two, nlmwire.ProcLock, blocked, nlmwire.Blocked)
	wantStat(t, s, two, nlmwire.ProcCancel, blocked, nlmwire.Granted)
	wantStat(t, s, two, nlmwire.ProcUnlock, other, nlmwire.Granted) // of no lock
	wantStat(t, s, two, nlmwire.ProcLock, other, nlmwire.Denied)
	reclaim := mine
	reclaim.Reclaim = true
	wantStat(t, s, one, nlmwire.ProcLock, reclaim, nlmwire.DeniedGracePeriod)
	stale := mine
	stale.Region.FH = []byte("stale")
	wantStat(t, s, one, nlmwire.ProcLock, stale, nlmwire.StaleFH)
	wantStat(t, s, one, nlmwire.ProcUnlock, mine, nlmwire.Granted)
	wantStat(t, s, two, nlmwire.ProcLock, other, nlmwire.Granted)
	if n := s.Locks(); n != 1 {
		t.Errorf("locks: got %d, want 1", n)
	}
}

func TestGracePeriod(t *testing.T) {
	state := filepath.Join(t.TempDir(), "dir", "state")
	s := newServer(state, time.Hour)
	lock := nlmwire.Args{Exclusive: true, Region: region("a", 1, 0, 9)}
	wantStat(t, s, one, nlmwire.ProcLock, lock, nlmwire.Granted)
	s.Close()

	s = newServer(state, time.Hour)
	wantStat(t, s, one, nlmwire.ProcLock, lock, nlmwire.DeniedGracePeriod)
	wantStat(t, s, one, nlmwire.ProcTest, lock, nlmwire.DeniedGracePeriod)
	reclaim := lock
	reclaim.Reclaim = true
	wantStat(t, s, one, nlmwire.ProcLock, reclaim, nlmwire.Granted)
	wantStat(t, s, one, nlmwire.ProcUnlock, lock, nlmwire.Granted)
	s.Close() // other clients may have locks to reclaim

	s = newServer(state, time.Nanosecond)
	wantStat(t, s, one, nlmwire.ProcLock, lock, nlmwire.Granted)
	wantStat(t, s, one, nlmwire.ProcUnlock, lock, nlmwire.Granted)
	s.Close()
	if _, err := os.Stat(state); !os.IsNotExist(err) {
		t.Errorf("state file after a close without locks: got error %v", err)
	}
	s = newServer(state, time.Hour)
	wantStat(t, s, one, nlmwire.ProcLock, lock, nlmwire.Granted)
}

func TestRestartedClientHasNoLocks(t *testing.T) {
	s := newServer("", 0)
	for i, peer := range []netip.Addr{one, one, two} {
		name := []string{"a", "b", "a"}[i]
		start := uint64(10 * i)
		a := nlmwire.Args{Exclusive: true, Region: region(name, 1, start, start)}
		wantStat(t, s, peer, nlmwire.ProcLock, a, nlmwire.Granted)
	}
	notify := sunrpc.AppendUint32(sunrpc.AppendString(nil, "a"), 3)
	h := sunrpc.CallHeader{Prog: nlmwire.NSMProgram, Vers: nlmwire.NSMVersion, Proc: nlmwire.NSMNotify}
	if _, _, err := sunrpc.ParseReply(s.ServeNSM(one, &h, notify, nil)); err != nil || s.Locks() != 2 {
		t.Errorf("after SM_NOTIFY: got error %v, %d locks; want 2", err, s.Locks())
	}
	h = sunrpc.CallHeader{Prog: nlmwire.Program, Vers: nlmwire.Version, Proc: uint32(nlmwire.ProcFreeAll)}
	if _, _, err := sunrpc.ParseReply(s.ServeNLM(two, &h, notify, nil)); err != nil || s.Locks() != 1 {
		t.Errorf("after FREE_ALL: got error %v, %d locks; want 1", err, s.Locks())
	}
}

func FuzzServe(f *testing.F) {
	a := nlmwire.Args{Exclusive: true, Region: region("a", 1, 0, 9)}
	for _, proc := range []nlmwire.Proc{nlmwire.ProcTest, nlmwire.ProcLock, nlmwire.ProcCancel, nlmwire.ProcUnlock} {
		f.Add(uint32(nlmwire.Program), uint32(nlmwire.Version), uint32(proc), nlmwire.AppendArgs(nil, proc, &a))
	}
	f.Add(uint32(nlmwire.NSMProgram), uint32(nlmwire.NSMVersion), uint32(nlmwire.NSMNotify),
		sunrpc.AppendUint32(sunrpc.AppendString(nil, "a"), 3))
	s := newServer("", 0)
	f.Fuzz(func(t *testing.T, prog, vers, proc uint32, args []byte) {
		h := sunrpc.CallHeader{XID: 7, Prog: prog, Vers: vers, Proc: proc}
		serve := s.ServeNLM
		if prog == nlmwire.NSMProgram {
			serve = s.ServeNSM
		}
		if reply := serve(one, &h, args, nil); len(reply) < sunrpc.AcceptedReplySize {
			t.Fatalf("got reply %x", reply)
		}
		if n := s.Locks(); n < 0 || n > maxLocks {
			t.Fatalf("got %d locks", n)
		}
	})
}

// asUser is call with the credential of a user.
func asUser(t *testing.T, s *Server, peer netip.Addr, uid uint32, proc nlmwire.Proc, r nlmwire.Region) nlmwire.Stat {
	t.Helper()
	cred := sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{UID: uid})
	h := sunrpc.CallHeader{XID: 7, Prog: nlmwire.Program, Vers: nlmwire.Version, Proc: uint32(proc),
		CredFlavor: sunrpc.FlavorSys, Cred: cred[2*sunrpc.SizeUint32:]}
	args := nlmwire.AppendArgs(nil, proc, &nlmwire.Args{Exclusive: true, Region: r})
	_, results, err := sunrpc.ParseReply(s.ServeNLM(peer, &h, args, nil))
	kit.Must(t, err)
	var res nlmwire.Res
	kit.Must(t, nlmwire.ParseRes(proc, results, &res))
	return res.Stat
}

// TestUserCannotTakeLocksOfClient sets locks as one user of a client, and unlocks parts of them,
// until the server refuses. Other users of the client still get locks, root those that are left for
// it, and other clients get theirs.
func TestUserCannotTakeLocksOfClient(t *testing.T) {
	const share, left = maxClientLocks / 2, maxClientLocks / 16
	s := newServer("", 0)
	next := uint64(0)
	fill := func(uid uint32) (n int) {
		for n = 0; n <= maxClientLocks; n++ {
			next += 4
			if asUser(t, s, one, uid, nlmwire.ProcLock, region("a", uid, next, next+2)) != nlmwire.Granted {
				break
			}
		}
		return n
	}
	want := func(what string, got, want int) {
		t.Helper()
		if got != want {
			t.Errorf("%s: got %d locks, want %d", what, got, want)
		}
	}
	want("first user", fill(1), share)
	if stat := asUser(t, s, one, 1, nlmwire.ProcUnlock, region("a", 1, 5, 5)); stat != nlmwire.DeniedNoLocks {
		t.Errorf("unlock of the middle at the limit: got %v, want %v", stat, nlmwire.DeniedNoLocks)
	}
	if stat := asUser(t, s, one, 1, nlmwire.ProcUnlock, region("a", 1, 5, 6)); stat != nlmwire.Granted {
		t.Errorf("unlock of the end at the limit: got %v", stat)
	}
	want("second user", fill(2), share-left)
	want("third user", fill(3), 0)
	want("root", fill(0), left)
	wantStat(t, s, two, nlmwire.ProcLock, nlmwire.Args{Region: region("b", 1, 0, 0)}, nlmwire.Granted)
	for uid := range uint32(4) { // as another user, as after a change of the user of a process
		if stat := asUser(t, s, one, 9, nlmwire.ProcUnlock, region("a", uid, 0, 1<<62)); stat != nlmwire.Granted {
			t.Errorf("unlock of all: got %v", stat)
		}
	}
	if len(s.clients) != 1 || len(s.holders) != 1 || s.Locks() != 1 {
		t.Errorf("after the unlock: got %d clients, %d owners, %d locks; want 1 of each", len(s.clients),
			len(s.holders), s.Locks())
	}
}
