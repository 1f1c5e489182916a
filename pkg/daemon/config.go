package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// A Config is the daemon's configuration: configs/nfsrdmad.toml, and one flag for each key with the
// same name and "-" for "_".
type Config struct {
	ControlSocket   Text     `toml:"control_socket"`
	MetricsListen   Text     `toml:"metrics_listen"`
	LogLevel        Text     `toml:"log_level"`
	LogFormat       Text     `toml:"log_format"`
	MountOptions    Text     `toml:"mount_options"`
	ConnectTimeout  Duration `toml:"connect_timeout"`
	ShutdownTimeout Duration `toml:"shutdown_timeout"`
	Inject          Text     `toml:"inject"` // faults; "" for none
}

// DefaultConfig returns the configuration without a file.
func DefaultConfig() Config {
	return Config{
		ControlSocket:   control.DefaultSocket,
		MetricsListen:   "127.0.0.1:9620",
		LogLevel:        "info",
		LogFormat:       "text",
		ConnectTimeout:  Duration(30 * time.Second),
		ShutdownTimeout: Duration(20 * time.Second),
	}
}

// A Field is one key of the configuration. Value has the methods of a command line flag's value.
type Field struct {
	Key   string // in TOML
	Usage string
	Value interface {
		String() string
		Set(string) error
		Type() string
	}
}

// Flag is the key as a flag's name.
func (f Field) Flag() string { return strings.ReplaceAll(f.Key, "_", "-") }

// Fields returns the keys of c, bound to c.
func (c *Config) Fields() []Field {
	return []Field{
		{"control_socket", "unix socket of the control API; absolute path", &c.ControlSocket},
		{"metrics_listen", "ADDRESS:PORT of the HTTP listener of /metrics and /healthz; empty turns it off",
			&c.MetricsListen},
		{"log_level", "trace, debug, info, warn or error", &c.LogLevel},
		{"log_format", "text or json", &c.LogFormat},
		{"mount_options", "mount options under those of each mount", &c.MountOptions},
		{"connect_timeout", "how long a mount may take", &c.ConnectTimeout},
		{"shutdown_timeout", "how long unmounting everything may take at the end", &c.ShutdownTimeout},
		{"inject", "break connections on purpose, for tests: seed=S,disconnect-every=N,... (see docs/operator.md)",
			&c.Inject},
	}
}

// LoadConfig reads the TOML file at path over the defaults. A key that does not exist is an error
// with file and line.
func LoadConfig(path string) (Config, error) {
	c := DefaultConfig()
	data, err := os.ReadFile(path)
	if err != nil {
		return c, control.Errorf(control.CodeUsage, "reading the configuration: %w; give its path with --config", err)
	}
	if err := c.checkTypes(path, data); err != nil {
		return c, err
	}
	dec := toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return c, &control.Error{Code: control.CodeUsage, Text: configErrorText(path, err), Err: err}
	}
	return c, c.Check(path)
}

// checkTypes refuses values that are no strings, and keys in capitals: every key takes one, and a
// bare number would pass as nanoseconds. Text that is no TOML is left to the decoder.
func (c *Config) checkTypes(path string, data []byte) error {
	keys := make(map[string]string)
	for _, f := range c.Fields() {
		keys[f.Key] = f.Value.String()
	}
	p := unstable.Parser{}
	p.Reset(data)
	for p.NextExpression() {
		e := p.Expression()
		if e.Kind == unstable.Table || e.Kind == unstable.ArrayTable {
			break // its keys are none of ours
		}
		if e.Kind != unstable.KeyValue {
			continue
		}
		it := e.Key()
		it.Next()
		key := it.Node()
		// the decoder would take it
		if right := strings.ToLower(string(key.Data)); right != string(key.Data) && hasKey(keys, right) {
			return control.Errorf(control.CodeUsage, "configuration %s:%d: unknown key %q; write it %s", path,
				p.Shape(key.Raw).Start.Line, key.Data, right)
		}
		if example, ours := keys[string(key.Data)]; ours && e.Value().Kind != unstable.String {
			return control.Errorf(control.CodeUsage, "configuration %s:%d: %s must be a string, in quotes, such as %q", path,
				p.Shape(key.Raw).Start.Line, key.Data, example)
		}
	}
	return nil
}

func hasKey(keys map[string]string, key string) bool {
	_, ok := keys[key]
	return ok
}

func configErrorText(path string, err error) string {
	var missing *toml.StrictMissingError
	if errors.As(err, &missing) && len(missing.Errors) > 0 {
		first := &missing.Errors[0]
		row, _ := first.Position()
		return fmt.Sprintf("configuration %s:%d: unknown key %q; remove it or see configs/nfsrdmad.toml for the keys",
			path, row, strings.Join(first.Key(), "."))
	}
	var bad *toml.DecodeError
	if errors.As(err, &bad) {
		row, col := bad.Position()
		return fmt.Sprintf("configuration %s:%d:%d: %s", path, row, col, strings.TrimPrefix(bad.Error(), "toml: "))
	}
	return fmt.Sprintf("configuration %s: %v", path, err)
}

// Check finds values that cannot work. source is named in the error.
func (c *Config) Check(source string) error {
	bad := func(key string, value any, want string) error {
		return control.Errorf(control.CodeUsage, "configuration %s: %s = %q: %s", source, key, fmt.Sprint(value), want)
	}
	if !strings.HasPrefix(string(c.ControlSocket), "/") {
		return bad("control_socket", c.ControlSocket, "must be an absolute path")
	}
	if c.MetricsListen != "" {
		if _, err := net.ResolveTCPAddr("tcp", string(c.MetricsListen)); err != nil {
			return bad("metrics_listen", c.MetricsListen, "must be ADDRESS:PORT or empty")
		}
	}
	switch c.LogLevel {
	case "trace", "debug", "info", "warn", "error":
	default:
		return bad("log_level", c.LogLevel, "must be trace, debug, info, warn or error")
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		return bad("log_format", c.LogFormat, "must be text or json")
	}
	if _, err := mount.ParseOptions(mount.DefaultOptions(), string(c.MountOptions)); err != nil {
		return bad("mount_options", c.MountOptions, err.Error())
	}
	if _, err := mount.ParseFaults(string(c.Inject)); err != nil {
		return bad("inject", c.Inject, err.Error())
	}
	for _, d := range []struct {
		key string
		v   Duration
	}{{"connect_timeout", c.ConnectTimeout}, {"shutdown_timeout", c.ShutdownTimeout}} {
		if d.v < Duration(time.Second) || d.v > Duration(control.MaxMountTimeout) {
			return bad(d.key, d.v, "must be from 1s to "+control.MaxMountTimeout.String())
		}
	}
	return nil
}

// Text is a string key.
type Text string

func (t *Text) String() string     { return string(*t) }
func (t *Text) Set(s string) error { *t = Text(s); return nil }

// Type names the value in a flag's help.
func (t *Text) Type() string { return "string" }

// Duration is a key such as "30s".
type Duration time.Duration

func (d Duration) String() string { return time.Duration(d).String() }

// Set parses a value in time.ParseDuration's syntax.
func (d *Duration) Set(s string) error {
	v, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf("%q is no duration such as 30s or 2m", s)
	}
	*d = Duration(v)
	return nil
}

// Type names the value in a flag's help.
func (d *Duration) Type() string { return "duration" }

// UnmarshalText reads the TOML string.
func (d *Duration) UnmarshalText(b []byte) error { return d.Set(string(b)) }

// Std is d as the standard library's type.
func (d Duration) Std() time.Duration { return time.Duration(d) }
