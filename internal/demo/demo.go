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

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// DefaultMaxFiles is a tree of some thousand files.
const DefaultMaxFiles = 4000

// cleanupTimeout bounds the unmounting at the end.
const cleanupTimeout = 10 * time.Second

// A Config says what the demo copies. The zero value is good but for Out.
type Config struct {
	Source   string // tree to copy; "" is Go's own source
	MaxFiles int    // 0 is DefaultMaxFiles
	Options  string // mount options
	Timeout  time.Duration
	Out      io.Writer

	inside func(*site) // for tests: called once all is set up
}

// Run runs the demo. Its errors are *control.Error.
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
		return &control.Error{Code: control.CodeCanceled, Err: err,
			Text: "demo: interrupted; everything was cleaned up"}
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return &control.Error{Code: control.CodeMount,
			Text: fmt.Sprintf("demo: not done after %v; try fewer --files or a longer --timeout",
				cfg.Timeout), Err: err}
	}
	return &control.Error{Code: control.CodeMount, Text: "demo: " + err.Error(), Err: err}
}

// goSource finds a tree that every machine with Go has.
func goSource(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return "", &control.Error{Code: control.CodeUsage, Text: "demo: finding Go's source with \"go env GOROOT\": " +
			err.Error() + "; name a tree with --source", Err: err}
	}
	return filepath.Join(strings.TrimSpace(string(out)), "src"), nil
}

// A site is everything that the demo makes.
type site struct {
	cfg    Config
	out    *screen
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
	s := &site{cfg: cfg, out: newScreen(cfg.Out), export: filepath.Join(root, "export"),
		dir: filepath.Join(root, "mnt")}
	defer func() { err = both(err, s.tearDown(root)) }()
	if err := s.setUp(ctx, root); err != nil {
		return err
	}
	if cfg.inside != nil {
		cfg.inside(s)
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
		NoRootSquash: true, StateDir: root, Provider: softiwarp.New(softiwarp.Config{}), Logger: log.Named("server")}
	var err error
	// The server outlives an interrupt, so that the unmount finds it.
	if s.server, err = nfsserve.Run(context.WithoutCancel(ctx), serve); err != nil {
		return err
	}
	cfg := daemon.DefaultConfig()
	cfg.ControlSocket = daemon.Text(filepath.Join(root, "control.sock"))
	cfg.MetricsListen = "127.0.0.1:0"
	cfg.ShutdownTimeout = daemon.Duration(cleanupTimeout)
	if s.daemon, err = daemon.Start(cfg, log); err != nil {
		return err
	}
	s.client = control.NewClient(string(cfg.ControlSocket))
	s.out.line("server     NFS/RDMA (softiwarp) %s, MOUNT %s (TCP)", s.server.RDMAAddr, s.server.TCPAddr)
	s.out.line("export     %s", s.export)
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
		fusefs.DisablePoll(s.dir) // the demo uses what it serves
		s.out.line("mounted    %s on %s", info.Spec, info.Dir)
	}
	return err
}

// exportPath is how clients name the served directory.
const exportPath = "/"

// tearDown undoes setUp as far as it came.
func (s *site) tearDown(root string) error {
	s.out.settle()
	if s.daemon != nil {
		s.daemon.Close()
	}
	var err error
	if s.server != nil {
		err = s.server.Close()
	}
	if mounts, mErr := mountinfo.GetMounts(mountinfo.SingleEntryFilter(s.dir)); mErr != nil || len(mounts) > 0 {
		return both(err, fmt.Errorf("%s is still mounted, so %s was left; unmount it with umount -l", s.dir, root))
	}
	return both(err, os.RemoveAll(root))
}

// both is a and b, either of which may be nil, on the one line that an error has.
func both(a, b error) error {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	return fmt.Errorf("%w; %w", a, b)
}
