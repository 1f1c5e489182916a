package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/moby/sys/mountinfo"

	"github.com/nfsrdmad/nfsrdmad/internal/screen"
	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/mountpoint"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// DefaultMaxFiles is the number of files that the demo copies by default. A server with a slow disk
// creates fewer than 100 files per second.
const DefaultMaxFiles = 1000

// cleanupTimeout bounds the unmount at the end.
const cleanupTimeout = 10 * time.Second

// Config holds the parameters of the demo. Only Out is required.
type Config struct {
	Source   string        // tree to copy; "" means the source of Go
	MaxFiles int           // 0 means DefaultMaxFiles
	Options  string        // mount options
	Timeout  time.Duration // of the whole demo; 0 means none
	Out      io.Writer     // progress and results

	onReady func(*site) // for tests: called after the first mount
}

// Run runs the demo until it is done, ctx ends, or the timeout passes. Its errors are
// *control.Error.
func Run(ctx context.Context, cfg Config) error {
	if cfg.MaxFiles <= 0 {
		cfg.MaxFiles = DefaultMaxFiles
	}
	if cfg.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, cfg.Timeout)
		defer cancel()
	}
	if err := mount.CheckPrivilege(); err != nil {
		return err
	}
	var err error
	if cfg.Source == "" {
		cfg.Source, err = goSource(ctx)
	}
	if err == nil {
		err = run(ctx, cfg)
	}
	var known *control.Error
	switch {
	case err == nil || errors.As(err, &known) && ctx.Err() == nil:
		return err
	case errors.Is(ctx.Err(), context.Canceled):
		return &control.Error{Code: control.CodeCanceled, Text: "demo: interrupted; everything was cleaned up",
			Err: err}
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return &control.Error{Code: control.CodeMount,
			Text: fmt.Sprintf("demo: not done after %v; use fewer --files or a longer --timeout",
				cfg.Timeout), Err: err}
	}
	return &control.Error{Code: control.CodeMount, Text: "demo: " + err.Error(), Err: err}
}

// goSource returns the directory of the source of Go.
func goSource(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return "", &control.Error{Code: control.CodeUsage, Text: "demo: find the source of Go: go env GOROOT: " +
			err.Error() + "; name a tree with --source", Err: err}
	}
	return filepath.Join(strings.TrimSpace(string(out)), "src"), nil
}

// A site holds everything that the demo creates.
type site struct {
	cfg    Config
	out    *screen.Screen
	server *nfsserve.Server
	daemon *daemon.Daemon
	client *control.Client
	export string // the served directory
	dir    string // the mount point
}

func run(ctx context.Context, cfg Config) (err error) {
	root, err := os.MkdirTemp("", "nfsrdmad-demo-")
	if err != nil {
		return err
	}
	s := &site{cfg: cfg, out: screen.New(cfg.Out), export: filepath.Join(root, "export"),
		dir: filepath.Join(root, "mnt")}
	defer func() { err = joinErrors(err, s.tearDown(root)) }()
	if err := s.setUp(ctx, root); err != nil {
		return err
	}
	if cfg.onReady != nil {
		cfg.onReady(s)
	}
	return s.show(ctx)
}

func (s *site) setUp(ctx context.Context, root string) error {
	for _, d := range []string{s.export, s.dir} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	log := hclog.New(&hclog.LoggerOptions{Name: "demo", Level: hclog.Error, Output: s.out})
	serve := nfsserve.Config{Dir: s.export, RDMAListen: "127.0.0.1:0", TCPListen: "127.0.0.1:0",
		NoRootSquash: true, Insecure: os.Geteuid() != 0, StateDir: root, Provider: softiwarp.New(softiwarp.Config{}),
		Logger: log.Named("server")}
	var err error
	// The server ignores an interrupt, because the unmount needs it.
	if s.server, err = nfsserve.Run(context.WithoutCancel(ctx), serve); err != nil {
		return err
	}
	cfg := daemon.DefaultConfig()
	cfg.ControlSocket = daemon.Text(filepath.Join(root, "control.sock"))
	cfg.MetricsListen = "127.0.0.1:0"
	cfg.StateDir = daemon.Text(root)
	cfg.KeepMounts = false // the mount ends with the demo
	cfg.ShutdownTimeout = daemon.Duration(cleanupTimeout)
	if s.daemon, err = daemon.Start(cfg, log); err != nil {
		return err
	}
	s.client = control.NewClient(string(cfg.ControlSocket))
	s.out.Line("server     NFS/RDMA (softiwarp) %s, MOUNT %s (TCP)", s.server.RDMAAddr, s.server.TCPAddr)
	s.out.Line("export     %s", s.export)
	return s.mount(ctx)
}

func (s *site) mount(ctx context.Context) error {
	_, tcpPort, err := net.SplitHostPort(s.server.TCPAddr)
	if err != nil {
		return err
	}
	opts := fmt.Sprintf("port=%d,mountport=%s", s.server.RDMAAddr.Port(), tcpPort)
	if s.cfg.Options != "" {
		opts += "," + s.cfg.Options
	}
	info, err := s.client.Mount(ctx, control.MountRequest{Spec: "127.0.0.1:" + exportPath, Dir: s.dir, Options: opts})
	if err == nil {
		mountpoint.DisablePoll(s.dir) // the demo uses a mount that it serves itself
		s.out.Line("mounted    %s on %s", info.Spec, info.Dir)
	}
	return err
}

// exportPath is the path of the served directory in MOUNT.
const exportPath = "/"

// tearDown removes what setUp created, also after an error of setUp.
func (s *site) tearDown(root string) error {
	s.out.EndProgress()
	if s.daemon != nil {
		s.daemon.Close()
	}
	var err error
	if s.server != nil {
		err = s.server.Close()
	}
	if mounts, mErr := mountinfo.GetMounts(mountinfo.SingleEntryFilter(s.dir)); mErr != nil || len(mounts) > 0 {
		return joinErrors(err, fmt.Errorf(
			"remove %s: %s is still mounted; run umount -l %[2]s and remove the directory", root, s.dir))
	}
	return joinErrors(err, os.RemoveAll(root))
}

// joinErrors joins a and b on one line. Either may be nil.
func joinErrors(a, b error) error {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	return fmt.Errorf("%w; %w", a, b)
}
