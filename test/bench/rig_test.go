package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/bench"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// Names of the targets.
const (
	targetF  = "F null FUSE"
	targetT  = "T raw TCP"
	targetP  = "P fuse-nfs, Ganesha"
	targetS  = "S directory"
	targetD  = "D nfsrdmad, serve DIR"
	targetR  = "R nfsrdmad, relay, Ganesha"
	targetXD = "S calls to serve DIR"
	targetXR = "S calls to relay, Ganesha"
	targetXP = "S calls to Ganesha, TCP"
)

// Names of the workloads besides those of internal/bench.
const (
	call4K      = "READ, 4 KiB"
	callRead1M  = "READ, 1 MiB, 8 in flight"
	callWrite1M = "WRITE, 1 MiB, 8 in flight"
	largeList   = "ls -l, large directory"
)

// A largeProgram lists the large directory. Its path follows the arguments. The pause before it is
// longer than the time for which the mount caches attributes, which doubles while they stay the
// same.
type largeProgram struct {
	workload string
	pause    time.Duration
	args     []string
}

// largePrograms are the programs that list the large directory, in this order.
var largePrograms = []largeProgram{
	{largeList, 0, []string{"ls", "-l"}},
	{"find -newer, large directory", 4 * time.Second, []string{"find", "-newer", "/etc/passwd"}},
	{"du -s, large directory", 7 * time.Second, []string{"du", "-s"}},
	{"rsync -n, large directory", 13 * time.Second, []string{"rsync", "-a", "-n", "--stats"}},
}

// command returns the command for a directory.
func (p largeProgram) command(ctx context.Context, dir string) *exec.Cmd {
	args := append([]string(nil), p.args...)
	switch args[0] {
	case "find": // the directory precedes the expression
		args = append([]string{"find", dir}, args[1:]...)
	case "rsync":
		args = append(args, dir, "/nonexistent/")
	default:
		args = append(args, dir)
	}
	return exec.CommandContext(ctx, args[0], args[1:]...)
}

// list runs a program on the large directory of D.
func (r *rig) list(ctx context.Context, p largeProgram) (bench.Sample, error) {
	if *fullFlag {
		time.Sleep(p.pause)
	}
	begin := time.Now()
	out, err := p.command(ctx, r.largeDir).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w: %.500s", p.workload, err, out)
	}
	return bench.Sample{Workload: p.workload, Callers: 1, Seconds: time.Since(begin).Seconds(),
		Calls: r.cfg.Entries}, err
}

// Names of the watched processes.
const (
	daemonProcess  = bench.Daemon
	serverProcess  = "server" // serve DIR, or the relay
	ganeshaProcess = "ganesha"
)

// Bytes of the messages of T. The requests and replies of NFS over softiwarp have about these
// sizes.
const (
	smallMessage = 160
	readReply4K  = 4300
)

// A target is a directory on which the workloads of internal/bench run.
type target struct {
	name string
	dir  *bench.Dir
}

// A rig has everything that is measured.
type rig struct {
	t       *testing.T
	cfg     config
	targets []target
	// largeDir is the large directory on a mount like D, but with noacl: ls -l would ask for ACLs,
	// and the other programs do not.
	largeDir string
	calls    map[string][]calls // by the name of the target
}

// newRig starts all processes. They end with the test.
func newRig(t *testing.T, cfg config) *rig {
	t.Helper()
	r := &rig{t: t, cfg: cfg}
	export := mounts.MemoryDir(t, "mode=777")
	r.fill(export)
	g := ganesha.Start(t, export)
	served := mounts.ServeDir(t, export, "--no-root-squash")
	relay, relayProcess := mounts.StartRelay(t, g)

	null, nullPID := r.mountNull()
	p, pPID := r.mountFuseNFS(g)
	d, dProcess := mounts.StartServedMount(t, served)
	m, mProcess := mounts.StartMount(t, g.Host+":"+g.Export, "port="+mounts.PortOf(t, relay), "mountport="+
		strconv.Itoa(g.MountPort))
	r.add(targetF, null, bench.Processes{daemonProcess: nullPID})
	r.add(targetP, p, bench.Processes{daemonProcess: pPID, ganeshaProcess: g.PID(t)})
	r.add(targetS, export, nil)
	r.add(targetD, d, bench.Processes{daemonProcess: dProcess.Cmd.Process.Pid, serverProcess: served.PID()})
	r.add(targetR, m, bench.Processes{daemonProcess: mProcess.Cmd.Process.Pid,
		serverProcess: relayProcess.Cmd.Process.Pid, ganeshaProcess: g.PID(t)})
	r.largeDir = filepath.Join(mounts.MountServed(t, served, "noacl"), largeDir)

	_, ready := r.startRole(roleEcho)
	echo := func(workload string, depth, out, back, block int) calls {
		return calls{Workload: workload, Kind: kindEcho, Addr: ready, Depth: depth, Out: out, Back: back, Block: block}
	}
	port, _ := strconv.Atoi(mounts.PortOf(t, served.TCP))
	toServed := calls{Kind: kindRDMA, Addr: served.RDMA, MountHost: "127.0.0.1", MountPort: port, Export: "/",
		Watch: bench.Processes{serverProcess: served.PID()}}
	toGanesha := calls{Kind: kindTCP, Addr: g.Addr(), MountHost: g.Host, MountPort: g.MountPort, Export: g.Export,
		Watch: bench.Processes{ganeshaProcess: g.PID(t)}}
	toRelay := toGanesha
	toRelay.Kind, toRelay.Addr = kindRDMA, relay
	toRelay.Watch = bench.Processes{serverProcess: relayProcess.Cmd.Process.Pid, ganeshaProcess: g.PID(t)}
	r.calls = map[string][]calls{
		targetT: {echo(call4K, 1, smallMessage, readReply4K, 4<<10), echo(callRead1M, 8, smallMessage, 1<<20, 1<<20),
			echo(callWrite1M, 8, 1<<20, smallMessage, 1<<20)},
		targetXD: r.nfsCalls(toServed), targetXR: r.nfsCalls(toRelay), targetXP: r.nfsCalls(toGanesha),
	}
	return r
}

// Names in the served directory.
const (
	readFile  = "yardstick-read"
	writeFile = "yardstick-write"
	largeDir  = "yardstick-large"
)

// fill makes the files of S and the large directory.
func (r *rig) fill(export string) {
	r.t.Helper()
	large := filepath.Join(export, largeDir)
	data := make([]byte, r.cfg.Size)
	for i := range data {
		data[i] = byte(i >> 12)
	}
	err := errors.Join(os.WriteFile(filepath.Join(export, readFile), data, 0o644),
		os.WriteFile(filepath.Join(export, writeFile), data, 0o644), os.Mkdir(large, 0o755))
	for i := 0; err == nil && i < r.cfg.Entries; i++ {
		err = os.WriteFile(filepath.Join(large, fmt.Sprintf("entry-%06d", i)), nil, 0o644)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// nfsCalls returns the calls of S to one server.
func (r *rig) nfsCalls(to calls) []calls {
	to.Size = r.cfg.Size
	all := []calls{to, to, to}
	all[0].Workload, all[0].Depth, all[0].Block, all[0].File = call4K, 1, 4<<10, readFile
	all[1].Workload, all[1].Depth, all[1].Block, all[1].File = callRead1M, 8, 1<<20, readFile
	all[2].Workload, all[2].Depth, all[2].Block, all[2].File = callWrite1M, 8, 1<<20, writeFile
	all[2].Write = true
	return all
}

// add adds a target whose files are below path.
func (r *rig) add(name, path string, watch bench.Processes) {
	r.t.Helper()
	r.targets = append(r.targets, target{name: name, dir: r.open(path, watch)})
}

func (r *rig) open(path string, watch bench.Processes) *bench.Dir {
	r.t.Helper()
	d, err := bench.Open(bench.Options{Path: path, Size: r.cfg.Size, Time: r.cfg.Time, Files: r.cfg.Files,
		Watch: watch})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := d.Close(); err != nil {
			r.t.Error(err)
		}
	})
	return d
}

// start starts a process whose standard input ends with the test, and returns its first line of
// output without "ready". The process must end when its input ends. Without wantReady, start does
// not wait for the line.
func (r *rig) start(cmd *exec.Cmd, wantReady bool) (pid int, ready string) {
	r.t.Helper()
	input, err := cmd.StdinPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	var log mounts.Output
	cmd.Stderr = &log
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		input.Close()
		timer := time.AfterFunc(mounts.ProcessTimeout, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		timer.Stop()
		if r.t.Failed() && log.String() != "" {
			r.t.Logf("output of %v:\n%s", cmd.Args, log.String())
		}
	})
	if !wantReady {
		return cmd.Process.Pid, ""
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		r.t.Fatalf("start %v: %v\n%s", cmd.Args, err, log.String())
	}
	return cmd.Process.Pid, strings.TrimSpace(strings.TrimPrefix(line, "ready"))
}

// startRole runs a role of this program.
func (r *rig) startRole(role string, args ...string) (pid int, ready string) {
	r.t.Helper()
	return r.start(roleCommand(context.Background(), role, args...), true)
}

func roleCommand(ctx context.Context, role string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	// With the race detector a process otherwise sleeps for one second when it exits.
	cmd.Env = append(os.Environ(), roleEnv+"="+role, "GORACE=atexit_sleep_ms=0")
	return cmd
}

// unmount unmounts dir when the test ends, before the process that serves it ends.
func (r *rig) unmount(dir string) {
	r.t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			r.t.Errorf("unmount %s: %v", dir, err)
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
	})
}

// mountNull mounts F.
func (r *rig) mountNull() (dir string, pid int) {
	r.t.Helper()
	dir = mounts.OpenTempDir(r.t)
	pid, _ = r.startRole(roleNull, dir)
	r.unmount(dir)
	if err := raiseReadAhead(dir); err != nil && !errors.Is(err, syscall.EROFS) {
		r.t.Fatal(err)
	}
	return dir, pid
}

// mountFuseNFS builds and mounts P.
func (r *rig) mountFuseNFS(g *ganesha.Server) (dir string, pid int) {
	r.t.Helper()
	program := filepath.Join(r.t.TempDir(), "fusenfs")
	mounts.Run(r.t, "", "gcc", "-O2", "-Wall", "-D_FILE_OFFSET_BITS=64", "-I/usr/include/fuse3", "-o", program,
		"fusenfs/fusenfs.c", "-lfuse3", "-lnfs", "-lpthread")
	dir = mounts.OpenTempDir(r.t)
	url := fmt.Sprintf("nfs://%s%s?nfsport=%d&mountport=%d", g.Host, g.Export, g.NFSPort, g.MountPort)
	pid, _ = r.start(exec.Command(program, url, dir), false)
	for deadline := time.Now().Add(mounts.ProcessTimeout); !mounts.IsMountPoint(dir); {
		if time.Now().After(deadline) {
			r.t.Fatalf("%s did not mount %s", program, dir)
		}
		time.Sleep(10 * time.Millisecond)
	}
	r.unmount(dir)
	return dir, pid
}

// call makes the calls of another process.
func (r *rig) call(ctx context.Context, c calls) (s bench.Sample, err error) {
	c.Time = r.cfg.Time
	text, err := json.Marshal(c)
	if err != nil {
		return s, err
	}
	var out, log bytes.Buffer
	cmd := roleCommand(ctx, roleCalls, string(text))
	cmd.Stdout, cmd.Stderr = &out, &log
	if err := cmd.Run(); err != nil {
		return s, fmt.Errorf("%w\n%s", err, log.String())
	}
	return s, json.Unmarshal(out.Bytes(), &s)
}
