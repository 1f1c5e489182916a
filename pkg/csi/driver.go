package csi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

const (
	// DefaultName is the default name of the driver in Kubernetes.
	DefaultName = "csi.nfsrdmad.github.io"
	// DefaultEndpoint is the default socket of the driver.
	DefaultEndpoint = "unix:///csi/csi.sock"
	// DefaultWorkDir is the default directory for the private mounts of the controller.
	DefaultWorkDir = "/run/nfsrdmad/csi"
)

const (
	// callTimeout bounds a call whose client sets no deadline.
	callTimeout = 2 * time.Minute
	// stopTimeout bounds the end of calls in progress when the driver stops.
	stopTimeout = 10 * time.Second
	// parentDirMode is the mode of a new directory above the work directory or the socket. The
	// default work directory is below the directory of the control socket, which members of the
	// control group must reach.
	parentDirMode = 0o755
)

// A Config configures a [Driver].
type Config struct {
	Name          string // of the driver in Kubernetes
	NodeID        string // name of this node in Kubernetes
	Endpoint      string // unix:///PATH
	ControlSocket string // of the daemon
	WorkDir       string // for the private mounts of the controller; the daemon must see it
	Logger        hclog.Logger
}

// check returns an error for the first invalid value.
func (c *Config) check() error {
	usage := func(format string, args ...any) error { return control.Errorf(control.CodeUsage, format, args...) }
	switch {
	case c.Name == "" || len(c.Name) > 63 || strings.Trim(c.Name, "abcdefghijklmnopqrstuvwxyz0123456789.-") != "":
		return usage("driver name %q: must be a domain name of at most 63 characters", brief(c.Name))
	case c.NodeID == "":
		return usage("node ID: empty; set --node-id to the name of the node in Kubernetes")
	case !filepath.IsAbs(c.WorkDir):
		return usage("work directory %q: must be an absolute path", brief(c.WorkDir))
	case !filepath.IsAbs(c.socket()):
		return usage("endpoint %q: must be unix:///PATH", brief(c.Endpoint))
	}
	return nil
}

// socket returns the path of the endpoint, "" if it is invalid.
func (c *Config) socket() string {
	path, ok := strings.CutPrefix(c.Endpoint, "unix:")
	if !ok {
		return ""
	}
	return strings.TrimPrefix(path, "//")
}

// A Driver serves CSI. It owns no mount. Its methods may be called concurrently.
type Driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer

	cfg    Config
	log    hclog.Logger
	client *control.Client
	locks  volumeLocks
	prober prober
}

// Run serves CSI at the endpoint until ctx ends. It removes the socket when it returns.
func Run(ctx context.Context, cfg Config) error {
	if err := cfg.check(); err != nil {
		return err
	}
	d := &Driver{cfg: cfg, log: cfg.Logger.Named("csi"), client: control.NewClient(cfg.ControlSocket)}
	d.prober.timeout = probeTimeout
	if err := d.prepareWorkDir(ctx); err != nil {
		return control.Errorf(control.CodeSystem, "work directory %s: %w", cfg.WorkDir, err)
	}
	l, err := listen(cfg.socket())
	if err != nil {
		return control.Errorf(control.CodeSystem, "endpoint %s: %w", cfg.Endpoint, err)
	}
	s := grpc.NewServer(grpc.UnaryInterceptor(d.intercept))
	csi.RegisterIdentityServer(s, d)
	csi.RegisterControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
	d.log.Info("serving CSI", "version", control.Version().Version, "name", cfg.Name, "node", cfg.NodeID, "endpoint",
		cfg.Endpoint, "control_socket", cfg.ControlSocket)
	failed := make(chan error, 1)
	go func() { failed <- s.Serve(l) }()
	select {
	case err := <-failed:
		return control.Errorf(control.CodeSystem, "serve %s: %w", cfg.Endpoint, err)
	case <-ctx.Done():
	}
	timer := time.AfterFunc(stopTimeout, s.Stop)
	defer timer.Stop()
	s.GracefulStop()
	<-failed
	d.log.Info("stopped; the mounts stay")
	return nil
}

// prepareWorkDir creates the work directory and releases what an earlier driver left there.
func (d *Driver) prepareWorkDir(ctx context.Context) error {
	if err := d.makeWorkDir(); err != nil {
		return err
	}
	resolved, err := filepath.EvalSymlinks(d.cfg.WorkDir) // the mount table has no symbolic links
	if err != nil {
		return err
	}
	d.cfg.WorkDir = resolved
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	d.releaseAll(ctx)
	return nil
}

// makeWorkDir creates the work directory if it does not exist.
func (d *Driver) makeWorkDir() error {
	if err := os.MkdirAll(filepath.Dir(d.cfg.WorkDir), parentDirMode); err != nil {
		return err
	}
	return os.MkdirAll(d.cfg.WorkDir, privateDirMode)
}

// listen listens on a unix socket, and replaces the socket of an earlier driver.
func listen(path string) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), parentDirMode); err != nil {
		return nil, err
	}
	switch fi, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case fi.Mode()&fs.ModeSocket == 0:
		return nil, errors.New("not a socket; remove the file, or choose another --endpoint")
	default:
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	return control.ListenPrivate(path)
}

// intercept bounds, logs and recovers a call. The log has no field of the request but the volume,
// because requests contain secrets.
func (d *Driver) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (reply any, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	method := filepath.Base(info.FullMethod)
	fields := []any{"method", method}
	if v, ok := req.(interface{ GetVolumeId() string }); ok {
		fields = append(fields, "volume", brief(v.GetVolumeId()))
	} else if v, ok := req.(interface{ GetName() string }); ok {
		fields = append(fields, "name", brief(v.GetName()))
	}
	begin := time.Now()
	defer func() {
		if p := recover(); p != nil {
			d.log.Error("panic in a call", append(fields, "panic", p, "stack", string(debug.Stack()))...)
			err = status.Errorf(codes.Internal, "%s: internal error; see the log of the driver", method)
			return
		}
		fields = append(fields, "took", time.Since(begin).Round(time.Millisecond))
		switch {
		case err != nil:
			d.log.Warn("call failed", append(fields, "code", status.Code(err), "error",
				status.Convert(err).Message())...)
		case isQuery(method):
			d.log.Debug("call", fields...)
		default:
			d.log.Info("call", fields...)
		}
	}()
	return handler(ctx, req)
}

// isQuery reports whether a method changes nothing. Kubernetes calls such methods often.
func isQuery(method string) bool {
	return method == "Probe" || strings.Contains(method, "Get") || strings.HasPrefix(method, "Validate")
}

// lock checks a volume ID, and allows no other call for the volume until release is called.
func (d *Driver) lock(id string) (release func(), err error) {
	if err := checkGiven("volume ID", id); err != nil {
		return nil, err
	}
	return d.locks.acquire(id)
}

// checkGiven returns an error if a request lacks an argument.
func checkGiven(what, value string) error {
	if value == "" {
		return invalid("missing %s", what)
	}
	return nil
}

// checkPath returns an error if a path of a request is not absolute.
func checkPath(what, path string) error {
	if err := checkGiven(what, path); err != nil {
		return err
	}
	if !filepath.IsAbs(path) || strings.ContainsRune(path, 0) {
		return invalid("%s %q: must be an absolute path", what, brief(path))
	}
	return nil
}

// describe names a volume in an error.
func describe(operation, id string) string { return fmt.Sprintf("%s %s", operation, brief(id)) }
