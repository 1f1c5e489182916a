package nlm_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// childEnv holds the port of the lock service for a process that a test started from the test
// binary.
const childEnv = "NLM_TEST_CHILD"

func TestMain(m *testing.M) {
	if port := os.Getenv(childEnv); port != "" {
		fmt.Fprintln(os.Stderr, "child:", lockUntilKilled(port))
		os.Exit(3)
	}
	kit.Main(m)
}

const (
	killSpan   = 64 // bytes that are locked
	killShared = 40 // from here, a competitor locks ranges too

	killPrograms = 4
	modelBytes   = killPrograms * unsafe.Sizeof(program{})
)

// A mode is that of a byte.
const (
	modeFree = iota
	modeShared
	modeExclusive
	modeLost
)

// A program is an owner that locks ranges of a file, one after the other. It tells what it does in
// memory that survives the process.
type program struct {
	op   atomic.Uint64    // now: mode<<16 | first<<8 | last, or 0
	done atomic.Uint32    // 1: the operation has succeeded
	ops  atomic.Uint32    // operations that succeeded
	told [killSpan]uint32 // modes before the operation
}

type operation struct{ mode, first, last uint64 }

func (o operation) word() uint64 { return 1<<32 | o.mode<<16 | o.first<<8 | o.last }

func operationOf(w uint64) operation { return operation{w >> 16 & 0xff, w >> 8 & 0xff, w & 0xff} }

func (o operation) has(b int) bool { return uint64(b) >= o.first && uint64(b) <= o.last }

func (o operation) lock(id nlm.Owner) nlm.Lock {
	return nlm.Lock{Start: o.first, End: o.last, Exclusive: o.mode == modeExclusive, Owner: id}
}

func programFile(i int) nfs3.FH {
	h, _ := nfs3.NewFH([]byte{'f', byte(i / 2)})
	return h
}

func programOwner(i int) nlm.Owner { return nlm.Owner{Kind: nlm.Posix, ID: uint64(i%2 + 1)} }

func mapPrograms(f *os.File) ([]program, []byte, error) {
	mem, err := unix.Mmap(int(f.Fd()), 0, int(modelBytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	return unsafe.Slice((*program)(unsafe.Pointer(&mem[0])), killPrograms), mem, nil
}

// do executes one operation.
func do(ctx context.Context, c *nlm.Client, i int, o operation, wait bool) error {
	if o.mode == modeFree {
		return c.Unlock(ctx, cred, programFile(i), programOwner(i), o.first, o.last)
	}
	return c.Lock(ctx, cred, programFile(i), o.lock(programOwner(i)), wait)
}

// acknowledge records that the operation in progress has succeeded.
func (p *program) acknowledge() {
	p.done.Store(1)
	o := operationOf(p.op.Load())
	for b := range p.told {
		if o.has(b) {
			atomic.StoreUint32(&p.told[b], uint32(o.mode))
		}
	}
	p.ops.Add(1)
	p.op.Store(0)
	p.done.Store(0)
}

// lockUntilKilled is the child. It has the file in descriptor 3, the model in descriptor 4, and a
// pipe to the parent in descriptor 5.
func lockUntilKilled(port string) error {
	f, err := slotfile.Open(os.NewFile(3, "file"), 1, nlm.StateTables())
	if err != nil {
		return err
	}
	programs, _, err := mapPrograms(os.NewFile(4, "model"))
	if err != nil {
		return err
	}
	cfg := nlm.Config{Host: "127.0.0.1", Caller: "test", State: nlm.NewState(f)}
	cfg.Port, _ = strconv.Atoi(port)
	cfg.Quick()
	c := nlm.New(cfg)
	if _, err := os.NewFile(5, "pipe").Write([]byte{1}); err != nil {
		return err
	}
	failed := make(chan error)
	for i := range programs {
		go func() {
			rnd := rand.New(rand.NewPCG(rand.Uint64(), 1))
			for {
				if err := programs[i].step(c, i, rnd); err != nil {
					failed <- fmt.Errorf("program %d: %w", i, err)
				}
			}
		}()
	}
	return <-failed
}

func (p *program) step(c *nlm.Client, i int, rnd *rand.Rand) error {
	first := rnd.Uint64N(killSpan)
	o := operation{mode: rnd.Uint64N(3), first: first, last: min(killSpan-1, first+rnd.Uint64N(24))}
	// A downgrade that ends early may lose the lock to the competitor.
	early := o.mode != modeShared || o.last < killShared
	wait := early && rnd.IntN(3) == 0
	ctx, cancel := context.WithCancel(context.Background())
	if wait || early && rnd.IntN(8) == 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(rnd.IntN(1500))*time.Microsecond)
	}
	defer cancel()
	p.op.Store(o.word())
	err := do(ctx, c, i, o, wait)
	if errors.Is(err, syscall.EINTR) && o.mode == modeFree {
		err = do(context.Background(), c, i, o, false)
	}
	switch err {
	case nil:
		p.acknowledge()
	case syscall.EINTR, syscall.EAGAIN, syscall.EDEADLK:
		p.op.Store(0)
	default:
		return err
	}
	return nil
}

// A killTest kills children that lock ranges with one State.
type killTest struct {
	t        *testing.T
	s        *lockServer
	k        *keptFile
	model    *os.File
	programs []program

	lost, open int  // programs with lost locks, and operations in progress at a kill
	late       bool // the process was not restored in the grace period of the server
}

func newKillTest(t *testing.T) *killTest {
	t.Helper()
	fd, err := unix.MemfdCreate("model", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	model := os.NewFile(uintptr(fd), "model")
	t.Cleanup(func() { model.Close() })
	if err := model.Truncate(int64(modelBytes)); err != nil {
		t.Fatal(err)
	}
	programs, mem, err := mapPrograms(model)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mem) })
	s := startLockServer(t)
	return &killTest{t: t, s: s, k: newKeptFile(t, s, nlm.StateTables()), model: model, programs: programs}
}

// run runs a child for some time and kills it.
func (k *killTest) run(early bool) {
	k.t.Helper()
	k.k.close()
	r, w, err := os.Pipe()
	if err != nil {
		k.t.Fatal(err)
	}
	defer r.Close()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), childEnv+"="+strconv.Itoa(k.s.l.Addr().(*net.TCPAddr).Port))
	c.ExtraFiles = []*os.File{k.k.d, k.model, w}
	c.Stderr = os.Stderr
	err = c.Start()
	w.Close()
	if err != nil {
		k.t.Fatal(err)
	}
	delay := rand.N(12 * time.Millisecond)
	if early {
		delay = rand.N(80 * time.Millisecond) // perhaps during the restore
	} else if _, err := r.Read(make([]byte, 1)); err != nil {
		k.t.Errorf("the child did not start: %v", err)
	}
	time.Sleep(delay)
	if err := c.Process.Kill(); err != nil {
		k.t.Fatal(err)
	}
	if err := c.Wait(); c.ProcessState.Exited() {
		k.t.Fatalf("child ended before it was killed: %v", err)
	}
}

// repeat repeats some operations in progress, as the kernel does.
func (k *killTest) repeat(c *nlm.Client) {
	for i := range k.programs {
		p := &k.programs[i]
		w := p.op.Load()
		if w == 0 || p.done.Load() == 1 || rand.IntN(2) == 0 {
			continue
		}
		switch err := do(k.t.Context(), c, i, operationOf(w), false); err {
		case nil:
			p.done.Store(1)
		case syscall.EAGAIN, syscall.EIO:
		default:
			k.t.Errorf("repeated %+v: %v", operationOf(w), err)
		}
	}
}

// modes returns the modes of the bytes in the tables of the client.
func modes(c *nlm.Client, i int) (m [killSpan]uint32) {
	held, lost := c.Table(programFile(i))
	for _, l := range held {
		for b := l.Start; b <= l.End && l.Owner == programOwner(i); b++ {
			m[b] = modeShared
			if l.Exclusive {
				m[b] = modeExclusive
			}
		}
	}
	for _, l := range lost {
		for b := l.Start; b <= l.End && l.Owner == programOwner(i); b++ {
			m[b] = modeLost
		}
	}
	return m
}

// check compares the tables of the client with what a program was told, and then takes the tables
// as the state of the program.
func (k *killTest) check(c *nlm.Client, i int) {
	k.t.Helper()
	p := &k.programs[i]
	w := p.op.Load()
	o, got, lost := operationOf(w), modes(c, i), false
	for b, v := range got {
		told, inside := p.told[b], w != 0 && o.has(b)
		ok := v == told && !(inside && p.done.Load() == 1) || inside && v == uint32(o.mode) ||
			v == modeLost && (k.late || inside && b >= killShared && p.done.Load() == 0)
		if !ok {
			k.t.Fatalf("program %d, byte %d: got mode %d, told %d; operation %+v, in progress %v, done %v\n%v\n%v",
				i, b, v, told, o, w != 0, p.done.Load() == 1, got, p.told)
		}
		lost = lost || v == modeLost
	}
	if w != 0 {
		k.open++
	}
	p.told = got
	p.op.Store(0)
	p.done.Store(0)
	if !lost {
		return
	}
	k.lost++
	if err := c.ReleaseOwner(k.t.Context(), cred, programFile(i), programOwner(i)); err != nil {
		k.t.Error(err)
	}
	p.told = [killSpan]uint32{}
}

// checkServer compares the locks of a program at the server with the tables of the client. It asks
// as the other owner of the file, with which only the locks of the program conflict.
func (k *killTest) checkServer(c *nlm.Client, i int) {
	k.t.Helper()
	h := programFile(i)
	svid, _ := c.Identity(programOwner(i))
	asSVID, asOH := c.Identity(programOwner(i ^ 1))
	denied := func(b int, exclusive bool) bool {
		a := nlm.Args{Cookie: []byte{1}, Exclusive: exclusive, Region: nlm.Region{Caller: "test", FH: h.Bytes(),
			OH: asOH, SVID: asSVID, Offset: uint64(b), Length: 1}}
		reply := k.s.nlmd.ServeNLM(netip.MustParseAddr("127.0.0.1"), &sunrpc.CallHeader{Vers: nlm.Version,
			Proc: uint32(nlm.ProcTest)}, nlm.AppendArgs(nil, nlm.ProcTest, &a), nil)
		var res nlm.Res
		if err := nlm.ParseRes(nlm.ProcTest, reply[sunrpc.AcceptedReplySize:], &res); err != nil {
			k.t.Fatal(err)
		}
		if res.Stat == nlm.Denied && res.Holder.SVID != svid {
			k.t.Fatalf("program %d, byte %d: unknown owner %d has a lock, want %d", i, b, res.Holder.SVID, svid)
		}
		return res.Stat == nlm.Denied
	}
	for b, want := range modes(c, i) {
		got := uint32(modeFree)
		switch {
		case denied(b, false):
			got = modeExclusive
		case denied(b, true):
			got = modeShared
		}
		if got != want {
			k.t.Fatalf("program %d, byte %d: the server has mode %d, the client %d", i, b, got, want)
		}
	}
}

// compete locks and unlocks ranges from another client until stopped is closed.
func (k *killTest) compete(c *nlm.Client, stopped chan struct{}) {
	for {
		select {
		case <-stopped:
			return
		default:
		}
		h := programFile(2 * rand.IntN(2))
		first := killShared + rand.Uint64N(killSpan-killShared)
		l := nlm.Lock{Start: first, End: min(killSpan-1, first+rand.Uint64N(6)), Exclusive: rand.IntN(2) == 0,
			Owner: alice}
		if err := c.Lock(k.t.Context(), cred, h, l, false); err != nil && err != syscall.EAGAIN {
			k.t.Errorf("competitor: %v", err)
		}
		if err := c.ReleaseOwner(k.t.Context(), cred, h, alice); err != nil {
			k.t.Errorf("competitor: %v", err)
		}
	}
}

// round kills one child and checks what the next process restores.
func (k *killTest) round(n int) {
	k.t.Helper()
	restart := n%24 == 5
	other := k.s.client(func(cfg *nlm.Config) { cfg.Caller = "other" })
	defer other.Close()
	stopped := make(chan struct{})
	var work sync.WaitGroup
	stop := sync.OnceFunc(func() {
		close(stopped)
		work.Wait()
	})
	defer stop()
	if !restart { // after a restart, locks would be lost whenever the grace period is too short
		work.Go(func() { k.compete(other, stopped) })
	}
	k.run(n%4 == 0)
	// A server may execute calls of the killed process late. Wait for the end of its connections.
	waitFor(k.t, "the end of the killed connections", func() bool {
		k.s.mu.Lock()
		defer k.s.mu.Unlock()
		return len(k.s.conns) <= 1 && (len(k.s.conns) == 0 || !restart)
	})
	const grace = 500 * time.Millisecond
	restarted := time.Now()
	if restart {
		k.s.restart(grace)
	}
	c := k.k.client(nil)
	k.repeat(c)
	c.WaitRestored()
	// On a busy machine, the server may refuse to give locks back.
	k.late = restart && time.Since(restarted) > grace
	stop()
	if restart {
		time.Sleep(time.Until(restarted.Add(2 * grace)))
	}
	if _, _, requests := k.k.state.Records(); requests != 0 {
		k.t.Fatalf("%d requests are not settled", requests)
	}
	for i := range k.programs {
		k.check(c, i)
	}
	for i := range k.programs {
		k.checkServer(c, i)
	}
	if n%10 == 9 {
		c.ReleaseStale(func(h nfs3.FH, id nlm.Owner) bool { return h != programFile(0) || id != programOwner(0) })
		waitFor(k.t, "the release", func() bool { return modes(c, 0) == [killSpan]uint32{} })
		k.programs[0].told = [killSpan]uint32{}
		k.checkServer(c, 0)
	}
	c.Detach()
}

// TestLocksSurviveKill kills a process that locks and unlocks ranges, at a random time, and
// compares the tables that the next process restores, and those of the server, with what programs
// were told.
func TestLocksSurviveKill(t *testing.T) {
	rounds := 120
	if testing.Short() {
		rounds = 15
	}
	k := newKillTest(t)
	ops, n := 0, 0
	enough := func() bool { return ops >= 10*rounds && k.open >= rounds/4 }
	for ; n < rounds || !enough() && n < 5*rounds; n++ { // a busy machine does less in a round
		k.round(n)
		ops = 0
		for i := range k.programs {
			ops += int(k.programs[i].ops.Load())
		}
	}
	t.Logf("%d rounds, %d operations; %d were in progress at a kill, %d programs lost locks", n, ops, k.open, k.lost)
	if !enough() {
		t.Errorf("got %d operations, %d in progress; want more", ops, k.open)
	}
}
