package fusefs

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// Tests of mounts whose server process is killed. The test process keeps the descriptors, as a
// descriptor store does. It never has a file of the mount open: a process that forks while it has
// one waits for the server.

// A takeover is a mount that several processes serve, one after the other.
type takeover struct {
	t        *testing.T
	export   *export
	dir      string
	kept     []*os.File // state, data, connection, and memory if there is some
	server   *takeoverChild
	programs *takeoverChild
	run      int                // number of the last directory
	kills    int                // how often a server process was killed
	events   []string           // at which a server process was killed
	onKill   func(event string) // called before the next process starts, if not nil
}

// A takeoverChild is another process of the test.
type takeoverChild struct {
	cmd     *exec.Cmd
	control *control
	reports chan takeoverMessage // closed when the process has ended
}

type takeoverMessage struct {
	serveReport
	files []*os.File
}

// keepRequestsEnv sets MountOptions.KeepRequests in the processes of a takeover.
const keepRequestsEnv = "NFSRDMAD_FUSEFS_TEST_KEEP_REQUESTS"

// takeoverWritebackEnv sets Options.Writeback in the processes of a takeover.
const takeoverWritebackEnv = "NFSRDMAD_FUSEFS_TEST_WRITEBACK"

// takeoverDeadline bounds each operation.
const takeoverDeadline = 20 * time.Second

func startTakeoverChild(t *testing.T, mode string) *takeoverChild {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	other := os.NewFile(uintptr(fds[1]), "control")
	defer other.Close()
	c, err := newControl(os.NewFile(uintptr(fds[0]), "control"))
	must(t, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), takeoverEnv+"="+mode)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.ExtraFiles = []*os.File{other}
	must(t, cmd.Start())
	p := &takeoverChild{cmd: cmd, control: c, reports: make(chan takeoverMessage, 8)}
	go p.receive()
	return p
}

// receive receives the reports until the process ends.
func (p *takeoverChild) receive() {
	defer close(p.reports)
	for {
		var m takeoverMessage
		var err error
		if m.files, err = p.control.receive(&m.serveReport); err != nil {
			break
		}
		p.reports <- m
	}
	_ = p.cmd.Wait()
	_ = p.control.conn.Close()
}

// kill ends the process and waits for its end.
func (p *takeoverChild) kill() {
	_ = p.cmd.Process.Kill()
	for range p.reports {
	}
}

// next returns the next report. ok is false when the process has ended.
func (p *takeoverChild) next(timeout time.Duration) (m takeoverMessage, ok bool, err error) {
	select {
	case m, ok = <-p.reports:
		return m, ok, nil
	case <-time.After(timeout):
		return m, false, errors.New("timeout")
	}
}

// newTakeover mounts the export.
func newTakeover(t *testing.T, e *export) *takeover {
	t.Helper()
	kit.NeedsFUSE(t)
	x := &takeover{t: t, export: e, dir: t.TempDir()}
	t.Cleanup(x.end)
	x.server = startTakeoverChild(t, "server")
	must(t, x.server.control.send(x.order("new")))
	m, ok, err := x.server.next(takeoverDeadline)
	if err != nil || !ok || len(m.files) < 3 {
		t.Fatalf("mount: got %+v, %v, %v", m, ok, err)
	}
	x.kept = m.files
	if m, ok, err = x.server.next(takeoverDeadline); err != nil || !ok || m.Err != "" {
		t.Fatalf("mount: got %+v, %v, %v", m, ok, err)
	}
	x.programs = startTakeoverChild(t, "programs")
	return x
}

func (x *takeover) order(do string) *serveOrder {
	return &serveOrder{Do: do, Dir: x.dir, Root: x.export.root.Bytes(), RDMA: x.export.rdmaAddr, TCP: x.export.tcpAddr,
		LockPort: x.export.tcpPort}
}

// end ends all processes and the mount.
func (x *takeover) end() {
	if x.server != nil {
		x.server.kill()
	}
	for _, f := range x.kept {
		_ = f.Close()
	}
	if x.programs != nil {
		x.programs.kill()
	}
	_ = unix.Unmount(x.dir, unix.MNT_DETACH)
}

// resume starts the next server process. It kills itself at event kill, counted from its start.
func (x *takeover) resume(kill int) {
	x.t.Helper()
	for range x.server.reports { // until the process has ended
	}
	x.server = startTakeoverChild(x.t, "server")
	o := x.order("resume")
	o.Kill, o.Records = kill, true
	must(x.t, x.server.control.send(o, x.kept...))
}

// resumed waits until the next server process serves the mount. It returns false if the process
// has killed itself.
func (x *takeover) resumed() bool {
	x.t.Helper()
	m, ok, err := x.server.next(takeoverDeadline)
	switch {
	case err != nil, ok && m.Err != "":
		x.t.Fatalf("resume after %q: got %+v, %v", x.lastEvents(), m, err)
	case ok && m.Killed != "":
		x.killed(m.Killed)
		return false
	case !ok:
		x.t.Fatalf("resume after %q: the process has ended", x.lastEvents())
	}
	return true
}

func (x *takeover) killed(event string) {
	x.kills++
	x.events = append(x.events, event)
	if x.onKill != nil {
		x.onKill(event)
	}
}

func (x *takeover) lastEvents() []string { return x.events[max(0, len(x.events)-3):] }

// tell sends an order to the server process. It returns false if the process has killed itself.
func (x *takeover) tell(o *serveOrder) (m takeoverMessage, ok bool) {
	x.t.Helper()
	if x.server.control.send(o) != nil { // the process has ended
		m, _, _ = x.server.next(takeoverDeadline)
		x.killed(m.Killed)
		return m, false
	}
	m, ok, err := x.server.next(takeoverDeadline)
	if err != nil {
		x.t.Fatalf("%s: %v", o.Do, err)
	}
	if m.Killed != "" || !ok {
		x.killed(m.Killed)
		return m, false
	}
	if m.Err != "" {
		x.t.Fatalf("%s: %s", o.Do, m.Err)
	}
	return m, true
}

// newRun returns the order for a new run of an operation.
func (x *takeover) newRun(op *takeoverOp) *programOrder {
	x.run++
	name := fmt.Sprintf("run%d", x.run)
	if op.shared {
		name = op.name
	}
	return &programOrder{Op: op.name, Dir: filepath.Join(x.dir, name), Local: filepath.Join(x.export.dir, name)}
}

// phase runs one phase of an operation. It starts the next server process when one was killed.
func (x *takeover) phase(o *programOrder, phase string) error {
	x.t.Helper()
	x.begin(o, phase)
	return x.finish(phase)
}

func (x *takeover) begin(o *programOrder, phase string) {
	x.t.Helper()
	p := *o
	p.Phase = phase
	must(x.t, x.programs.control.send(&p))
}

// finish waits for the end of a phase.
func (x *takeover) finish(phase string) error {
	x.t.Helper()
	deadline := time.After(takeoverDeadline)
	for {
		select {
		case m, ok := <-x.programs.reports:
			if !ok {
				x.t.Fatalf("%s: the process of the programs has ended", phase)
			}
			if m.Err != "" {
				return errors.New(m.Err)
			}
			return nil
		case m, ok := <-x.server.reports:
			switch {
			case m.Killed != "":
				x.killed(m.Killed)
			case !ok:
				x.resume(0)
				if !x.resumed() {
					x.t.Fatal("killed again")
				}
			}
		case <-deadline:
			x.t.Fatalf("%s: timeout after the kills %q", phase, x.lastEvents())
		}
	}
}

// disarm stops the counting of events. It starts the next server process if one was killed.
func (x *takeover) disarm() {
	x.t.Helper()
	if _, ok := x.tell(&serveOrder{Do: "disarm"}); !ok {
		x.resume(0)
		x.resumed()
	}
}

// finishMount unmounts and checks that nothing is left.
func (x *takeover) finishMount() {
	x.t.Helper()
	x.programs.kill()
	var m takeoverMessage
	for end := time.Now().Add(takeoverDeadline); ; time.Sleep(50 * time.Millisecond) {
		m, _ = x.tell(&serveOrder{Do: "report"})
		if m.Files == 0 && m.Tables["requests"] == 0 && m.Tables["hidden"] == 0 && (m.Settled || x.kills == 0) {
			break
		}
		if time.Now().After(end) {
			x.t.Errorf("before unmount: got %+v, want no files, no records, and settled", m.serveReport)
			break
		}
	}
	if m.Inodes != m.Tables["nodes"] {
		x.t.Errorf("records of nodes: got %d, want one for each of %d inodes", m.Tables["nodes"], m.Inodes)
	}
	m, ok := x.tell(&serveOrder{Do: "unmount"})
	if !ok {
		x.t.Fatal("unmount: the process has ended")
	}
	for name, n := range m.Tables {
		if want := map[string]int{"mount": 1, "nodes": n}[name]; n != want {
			x.t.Errorf("records in table %s after unmount: got %d, want %d", name, n, want)
		}
	}
	if m.Out != 0 || m.Files != 0 {
		x.t.Errorf("after unmount: got %d buffers in use and %d open files, want 0", m.Out, m.Files)
	}
}

// isUnclear reports whether an operation may have another result after a kill at an event: the
// server has replied, and the process has not recorded the reply.
func (op *takeoverOp) isUnclear(event string) bool {
	return op.unclear && strings.HasPrefix(event, "after")
}

// TestTakeoverAtEachEvent kills the server process at the events of each operation: before and
// after each call, each reply to the kernel, and each change of a record. One run tests every
// second event.
func TestTakeoverAtEachEvent(t *testing.T) {
	stride := 2
	if testing.Short() {
		stride = 9
	}
	if os.Getenv(keepRequestsEnv) != "" {
		stride = 9
	}
	eachServer(t, func(t *testing.T, e *export) {
		x := newTakeover(t, e)
		for i := range takeoverOps {
			op := &takeoverOps[i]
			if op.name == "write" { // the last ones are for other tests
				break
			}
			x.atEachEvent(op, stride)
			if t.Failed() {
				return
			}
		}
		x.finishMount()
	})
}

// TestTakeoverOfKeptRequests is TestTakeoverAtEachEvent, with fewer events, for kernels that cannot
// send requests again.
func TestTakeoverOfKeptRequests(t *testing.T) {
	t.Setenv(keepRequestsEnv, "1")
	TestTakeoverAtEachEvent(t)
}

func (x *takeover) atEachEvent(op *takeoverOp, stride int) {
	x.t.Helper()
	start, kills := time.Now(), x.kills
	if op.many {
		stride *= 4
	}
	for event := 1 + rand.N(stride); ; event += stride {
		before := x.kills
		o := x.newRun(op)
		if err := x.phase(o, "prepare"); err != nil && !op.shared {
			x.t.Errorf("%s: prepare: %v", op.name, err)
			return
		}
		if _, ok := x.tell(&serveOrder{Do: "arm", Kill: event, Records: !op.many}); !ok {
			x.resume(0) // an event of "prepare" came late, for example a RELEASE
			x.resumed()
		}
		err := x.phase(o, "do")
		x.disarm()
		last := x.events[max(0, len(x.events)-1):]
		if err != nil && (before == x.kills || !op.isUnclear(last[0])) {
			x.t.Errorf("%s, killed at event %d (%q): %v", op.name, event, last, err)
			return
		}
		if err := x.phase(o, "check"); err != nil {
			x.t.Errorf("%s, killed at event %d (%q): check: %v", op.name, event, last, err)
			return
		}
		if x.kills == before {
			x.t.Logf("%s: %d kills, %v", op.name, x.kills-kills, time.Since(start).Round(time.Millisecond))
			return
		}
	}
}

// TestTakeoverKeepsWrittenData kills the server process between write(2) and fsync(2).
func TestTakeoverKeepsWrittenData(t *testing.T) {
	rounds := 100
	if testing.Short() {
		rounds = 5
	}
	eachServer(t, func(t *testing.T, e *export) {
		x := newTakeover(t, e)
		op := opNamed("write")
		for range rounds {
			o := x.newRun(op)
			must(t, x.phase(o, "prepare"))
			must(t, x.phase(o, "do"))
			time.Sleep(rand.N(3 * time.Millisecond))
			must(t, x.server.cmd.Process.Kill())
			if err := x.phase(o, "check"); err != nil {
				t.Fatal(err)
			}
			x.kills++
		}
		x.finishMount()
	})
}

// TestTakeoverKeepsPages is TestTakeoverKeepsWrittenData with the kernel's writeback cache: the
// data is in the pages of the kernel when the server process is killed.
func TestTakeoverKeepsPages(t *testing.T) {
	t.Setenv(takeoverWritebackEnv, "1")
	TestTakeoverKeepsWrittenData(t)
}

func opNamed(name string) *takeoverOp {
	for i := range takeoverOps {
		if takeoverOps[i].name == name {
			return &takeoverOps[i]
		}
	}
	panic(name)
}

// TestTakeoverOfBusyMount kills the server process at random times, while programs work.
func TestTakeoverOfBusyMount(t *testing.T) {
	kills := 20
	if testing.Short() {
		kills = 3
	}
	eachServer(t, func(t *testing.T, e *export) {
		x := newTakeover(t, e)
		o := x.newRun(opNamed("busy"))
		must(t, x.phase(o, "prepare"))
		must(t, x.phase(o, "do"))
		for range kills {
			time.Sleep(50*time.Millisecond + rand.N(200*time.Millisecond))
			must(t, x.server.cmd.Process.Kill())
			x.resume(0)
			x.resumed()
			x.kills++
		}
		if err := x.phase(o, "check"); err != nil {
			t.Fatal(err)
		}
		x.finishMount()
	})
}

// TestTakeoverKilledDuringRestore kills two processes in a row while they continue a mount with
// written data, a hidden file and a request in progress.
func TestTakeoverKilledDuringRestore(t *testing.T) {
	stride := 2
	if testing.Short() {
		stride = 15
	}
	eachServer(t, func(t *testing.T, e *export) {
		x := newTakeover(t, e)
		for event := 1 + rand.N(stride); ; event += stride {
			data, hidden, request := x.newRun(opNamed("write")), x.newRun(opNamed("unlink of an open file")),
				x.newRun(opNamed("append"))
			for _, o := range []*programOrder{data, hidden, request} {
				must(t, x.phase(o, "prepare"))
			}
			must(t, x.phase(hidden, "do"))
			must(t, x.phase(data, "do"))
			x.server.kill()
			x.begin(request, "do")
			before := x.kills
			for range 2 {
				x.resume(event)
				x.awaitKill()
			}
			x.resume(0)
			x.resumed()
			if err := x.finish("do"); err != nil {
				t.Fatalf("killed at event %d (%q): append: %v", event, x.lastEvents(), err)
			}
			for _, o := range []*programOrder{data, hidden, request} {
				if err := x.phase(o, "check"); err != nil {
					t.Fatalf("killed at event %d (%q): %s: %v", event, x.lastEvents(), o.Op, err)
				}
			}
			if x.kills == before {
				t.Logf("killed at %d events", event)
				break
			}
			x.kills++ // of the process that made the data
		}
		x.finishMount()
	})
}

// restoreTime is longer than a process takes to continue a mount.
const restoreTime = 200 * time.Millisecond

// awaitKill waits until the server process has killed itself, and kills it if it does not.
func (x *takeover) awaitKill() {
	x.t.Helper()
	for timeout := time.After(restoreTime); ; {
		select {
		case m, ok := <-x.server.reports:
			switch {
			case !ok:
				return
			case m.Killed != "":
				x.killed(m.Killed)
			case m.Err != "":
				x.t.Fatalf("resume: %s", m.Err)
			}
		case <-timeout:
			_ = x.server.cmd.Process.Kill()
		}
	}
}

// TestTakeoverRefusesDamagedState damages a record while no process serves the mount. The next
// process must leave the mount alone, and one that gets the undamaged record must continue it.
func TestTakeoverRefusesDamagedState(t *testing.T) {
	e := startOwnExport(t)
	x := newTakeover(t, e)
	o := x.newRun(opNamed("write"))
	must(t, x.phase(o, "prepare"))
	must(t, x.phase(o, "do"))
	x.server.kill()
	state := int(x.kept[0].Fd())
	at, err := unix.Seek(state, 0, unix.SEEK_DATA)
	must(t, err)
	b := make([]byte, 1<<20)
	n, err := unix.Pread(state, b, at)
	must(t, err)
	text := strings.Index(string(b[:n]), "test") // the description of the mount
	damage := func() {
		b[text] ^= 1
		_, err := unix.Pwrite(state, b[text:text+1], at+int64(text))
		must(t, err)
	}
	damage()
	x.resume(0)
	m, ok, err := x.server.next(takeoverDeadline)
	if err != nil || !ok || !strings.Contains(m.Err, "damaged") {
		t.Fatalf("resume with a damaged record: got %+v, %v, %v, want an error", m, ok, err)
	}
	damage() // undone
	x.resume(0)
	x.resumed()
	x.kills++
	if err := x.phase(o, "check"); err != nil {
		t.Fatal(err)
	}
	x.finishMount()
}

// TestTakeoverRepeatsCallsOnce kills the process after a call that the server has executed. Another
// client then changes the object. The next process repeats the call, and the server must recognize
// it: a second execution would change or remove the object of the other client.
func TestTakeoverRepeatsCallsOnce(t *testing.T) {
	e := startOwnExport(t)
	x := newTakeover(t, e)
	for _, c := range []struct {
		op, event string
		other     func(dir string) error
		check     func(dir string) error
	}{
		{"unlink", "after call 12", func(dir string) error { return os.WriteFile(dir+"/f", []byte("new"), 0o644) },
			func(dir string) error { return localFile(dir+"/f", "new") }},
		{"rename", "after call 14", func(dir string) error { return os.WriteFile(dir+"/f", []byte("new"), 0o644) },
			func(dir string) error {
				return errors.Join(localFile(dir+"/f", "new"), localFile(dir+"/g", string(content)))
			}},
		{"rmdir", "after call 13", func(dir string) error { return os.Mkdir(dir+"/d", 0o755) },
			func(dir string) error { return localMode(dir+"/d", unix.S_IFDIR|0o755) }},
		{"chmod", "after call 2", func(dir string) error { return os.Chmod(dir+"/f", 0o640) },
			func(dir string) error { return localMode(dir+"/f", unix.S_IFREG|0o640) }},
		{"truncate", "after call 2", func(dir string) error { return os.WriteFile(dir+"/f", []byte("longer"), 0o644) },
			func(dir string) error { return localFile(dir+"/f", "longer") }},
		{"link", "after call 15", func(dir string) error { return os.Remove(dir + "/g") },
			func(dir string) error { return localFile(dir+"/f", string(content)) }},
	} {
		changed := false
		for event := 1; !changed && event < 100; event++ {
			o := x.newRun(opNamed(c.op))
			must(t, x.phase(o, "prepare"))
			x.onKill = func(event string) {
				if event == c.event {
					changed = true
					must(t, c.other(o.Local))
				}
			}
			x.tell(&serveOrder{Do: "arm", Kill: event})
			if err := x.phase(o, "do"); err != nil {
				t.Errorf("%s, killed %v: %v", c.op, x.lastEvents(), err)
			}
			x.disarm()
			x.onKill = nil
			if !changed {
				must(t, x.phase(o, "check"))
			} else if err := c.check(o.Local); err != nil {
				t.Errorf("%s: executed again: %v", c.op, err)
			}
		}
		if !changed {
			t.Errorf("%s: no kill %s", c.op, c.event)
		}
	}
	x.finishMount()
}

func localFile(path, want string) error {
	got, err := os.ReadFile(path)
	if err == nil && string(got) != want {
		err = fmt.Errorf("content of %s: got %q, want %q", path, got, want)
	}
	return err
}

func localMode(path string, want uint32) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return fmt.Errorf("lstat %s: %w", path, err)
	}
	if st.Mode != want {
		return fmt.Errorf("mode of %s: got %o, want %o", path, st.Mode, want)
	}
	return nil
}
