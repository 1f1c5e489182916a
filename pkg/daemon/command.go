package daemon

import (
	"context"
	"io"
	"os"
	"unicode/utf8"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// ConfigFrom returns the configuration of file, or the default configuration if file is "". The
// fields of flags for which given returns true override it.
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
			return cfg, control.Errorf(control.CodeUsage, "flag --%s: %w", f.Flag(), err)
		}
	}
	return cfg, cfg.Check("from flags")
}

// A MountCommandConfig holds the arguments of the mount command.
type MountCommandConfig struct {
	Request    control.MountRequest
	Socket     string                  // path of the control socket
	Foreground bool                    // serve the mount in this process
	CheckOnly  bool                    // mount(8) -f
	Sloppy     bool                    // mount(8) -s
	LogLevel   string                  // with Foreground
	Inject     string                  // fault injection plan, with Foreground
	Log        io.Writer               // with Foreground
	Mounted    func(control.MountInfo) // called once mounted; may be nil
}

// MountCommand checks the arguments and requests the mount from the daemon. With Foreground it
// serves the mount in this process until ctx ends or the mount is unmounted.
func MountCommand(ctx context.Context, c MountCommandConfig) error {
	r := c.Request
	if c.Sloppy {
		r.Options = mount.KnownOptions(r.Options)
	}
	dir, err := control.AbsolutePath(r.Dir)
	if err != nil {
		return err
	}
	r.Dir = dir
	if _, err := mount.ParseSpec(r.Spec); err != nil {
		return err
	}
	if _, err := mount.ParseOptions(mount.DefaultOptions(), r.Options); err != nil {
		return err
	}
	if c.Inject != "" && !c.Foreground {
		return control.Errorf(control.CodeUsage,
			"flag --inject: requires --foreground; add it, or set --inject of \"nfsrdmad daemon\"")
	}
	if !r.Virtiofs {
		f, err := mount.OpenAutomount(ctx, dir)
		if err != nil {
			return err
		}
		if f != nil {
			defer f.Close()
			r.DirFD, r.Process = int(f.Fd()), os.Getpid() // the server of the daemon sets Process, too
		}
	}
	if c.CheckOnly {
		at, err := mount.CheckMountPoint(ctx, r)
		if err == nil {
			at.Close()
		}
		return err
	}
	if !c.Foreground && !utf8.ValidString(r.Spec+dir+r.Options) {
		return control.Errorf(control.CodeUsage, "mount %q on %q: the control API requires UTF-8; "+
			"mount on a symbolic link to the directory, or use --foreground", control.Brief(r.Spec), dir)
	}
	mounted := c.Mounted
	if mounted == nil {
		mounted = func(control.MountInfo) {}
	}
	if c.Foreground {
		cfg := DefaultConfig()
		cfg.LogLevel, cfg.Inject = Text(c.LogLevel), Text(c.Inject)
		if err := cfg.Check("from flags"); err != nil {
			return err
		}
		return RunForeground(ctx, cfg, NewLogger(cfg, c.Log), r, mounted)
	}
	info, err := control.NewClient(c.Socket).Mount(ctx, r)
	if err != nil {
		return err
	}
	mounted(info)
	return nil
}
