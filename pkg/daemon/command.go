package daemon

import (
	"context"
	"io"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/hashicorp/go-hclog"
)

// ConfigFrom is the configuration of file (none if ""), and over it those fields of flags that were
// given.
func ConfigFrom(file string, flags Config, given func(Field) bool) (Config, error) {
	cfg := DefaultConfig()
	if file != "" {
		var err error
		if cfg, err = LoadConfig(file); err != nil {
			return cfg, err
		}
	}
	to := cfg.Fields()
	for i, f := range flags.Fields() {
		if !given(f) {
			continue
		}
		if err := to[i].Value.Set(f.Value.String()); err != nil {
			return cfg, errorf(CodeUsage, "flag --%s: %w", f.Flag(), err)
		}
	}
	return cfg, cfg.Check("from flags")
}

// A MountCommandConfig is what the mount verb was told.
type MountCommandConfig struct {
	Request    MountRequest
	Socket     string
	Foreground bool   // serve the mount in this process
	CheckOnly  bool   // mount(8) -f
	Sloppy     bool   // mount(8) -s
	LogLevel   string // of the foreground
	Inject     string // faults, in the foreground
	Log        io.Writer
	Mounted    func(MountInfo) // told of the mount when it stands; may be nil
}

// MountCommand mounts by the daemon, or in this process until ctx ends or somebody unmounts.
func MountCommand(ctx context.Context, c MountCommandConfig) error {
	r := c.Request
	if c.Sloppy {
		r.Options = knownOptions(r.Options)
	}
	dir, err := absolute(r.Dir)
	if err != nil {
		return err
	}
	r.Dir = dir
	if _, err := ParseSpec(r.Spec); err != nil {
		return err
	}
	if _, err := ParseOptions(DefaultOptions(), r.Options); err != nil {
		return err
	}
	if c.Inject != "" && !c.Foreground {
		return errorf(CodeUsage, "flag --inject: faults are the daemon's to inject; give it to \"nfsrdmad daemon\", or add --foreground")
	}
	if c.CheckOnly {
		_, err := CheckMountPoint(ctx, dir)
		return err
	}
	if !c.Foreground && !utf8.ValidString(r.Spec+dir+r.Options) {
		return errorf(CodeUsage, "mounting %q on %q: the daemon is told in UTF-8, which this is not; mount on a symbolic link to it, or use --foreground", brief(r.Spec), dir)
	}
	mounted := c.Mounted
	if mounted == nil {
		mounted = func(MountInfo) {}
	}
	if c.Foreground {
		cfg := DefaultConfig()
		cfg.LogLevel, cfg.Inject = Text(c.LogLevel), Text(c.Inject)
		if err := cfg.Check("from flags"); err != nil {
			return err
		}
		return RunForeground(ctx, cfg, NewLogger(cfg, c.Log), r, mounted)
	}
	info, err := NewClient(c.Socket).Mount(ctx, r)
	if err != nil {
		return err
	}
	mounted(info)
	return nil
}

// UmountCommand unmounts by the daemon.
func UmountCommand(ctx context.Context, socket, dir string, force, lazy bool) error {
	dir, err := absolute(dir)
	if err != nil {
		return err
	}
	mode := UmountNormal
	switch {
	case force:
		mode = UmountForce
	case lazy:
		mode = UmountLazy
	}
	return NewClient(socket).Umount(ctx, UmountRequest{Dir: dir, Mode: mode})
}

// OptionalDir is the only argument as an absolute path, or "".
func OptionalDir(args []string) (string, error) {
	if len(args) == 0 {
		return "", nil
	}
	return absolute(args[0])
}

// absolute makes a path of the caller's that the daemon understands. It looks at nothing.
func absolute(dir string) (string, error) {
	if dir == "" {
		return "", errorf(CodeUsage, "mount point \"\": not a path; name a directory")
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", errorf(CodeSystem, "mount point %s: %w", dir, err)
	}
	return abs, nil
}

// knownOptions leaves out the options whose names nobody knows.
func knownOptions(list string) string {
	var known []string
	for item := range strings.SplitSeq(list, ",") {
		name, _, _ := strings.Cut(item, "=")
		if optionByName[name] != nil {
			known = append(known, item)
		}
	}
	return strings.Join(known, ",")
}

// foreground serves one mount without a control socket.
func foreground(ctx context.Context, cfg Config, log hclog.Logger, r MountRequest, build builder,
	mounted func(MountInfo)) error {
	t := newTable(log.Named("mount"), DefaultOptions(), cfg.ConnectTimeout.Std(), build)
	t.quiet = true
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.ShutdownTimeout.Std())
		defer cancel()
		t.Close(ctx)
		settleConnects()
	}()
	info, err := t.Mount(ctx, r)
	if err != nil {
		return err
	}
	mounted(info)
	t.wait(ctx, info.Dir)
	return nil
}

// wait returns when the mount at dir is gone, or ctx ends.
func (t *Table) wait(ctx context.Context, dir string) {
	t.mu.Lock()
	e := t.mu.entries[dir]
	t.mu.Unlock()
	if e == nil {
		return
	}
	select {
	case <-e.gone:
	case <-ctx.Done():
	}
}
