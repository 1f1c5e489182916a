package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics/otlp"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// A Config is the configuration of the daemon. Each field is a key of configs/nfsrdmad.toml, and a
// flag with the name of the key and "-" for "_".
type Config struct {
	ControlSocket   Text     `toml:"control_socket"`
	ControlGroup    Text     `toml:"control_group"`
	AllowMounts     Text     `toml:"allow_mounts"`
	MetricsListen   Text     `toml:"metrics_listen"`
	MetricsHosts    Text     `toml:"metrics_hosts"`
	LogLevel        Text     `toml:"log_level"`
	LogFormat       Text     `toml:"log_format"`
	MountOptions    Text     `toml:"mount_options"`
	NLMListen       Text     `toml:"nlm_listen"`
	StateDir        Text     `toml:"state_dir"`
	ConnectTimeout  Duration `toml:"connect_timeout"`
	ShutdownTimeout Duration `toml:"shutdown_timeout"`
	DirtyBytes      Bytes    `toml:"dirty_bytes"`
	ConnectRate     Number   `toml:"connect_rate"`
	KeepMounts      Switch   `toml:"keep_mounts"`
	OTLPEndpoint    Text     `toml:"otlp_endpoint"`
	OTLPRatio       Ratio    `toml:"otlp_ratio"`
	Inject          Text     `toml:"inject"` // fault injection plan; "" for none
}

// DefaultConfig returns the default configuration.
func DefaultConfig() Config {
	return Config{
		ControlSocket:   control.DefaultSocket,
		MetricsListen:   "127.0.0.1:9620",
		LogLevel:        "info",
		LogFormat:       "text",
		NLMListen:       ":0",
		StateDir:        "/var/lib/nfsrdmad",
		ConnectTimeout:  Duration(30 * time.Second),
		ShutdownTimeout: Duration(20 * time.Second),
		DirtyBytes:      256 << 20,
		ConnectRate:     50,
		KeepMounts:      true,
		OTLPRatio:       0.001,
	}
}

// A Field is one key of the configuration. Value implements pflag.Value.
type Field struct {
	Key   string // in TOML
	Usage string
	Value interface {
		String() string
		Set(string) error
		Type() string
	}
}

// Flag returns the name of the flag of f.
func (f Field) Flag() string { return strings.ReplaceAll(f.Key, "_", "-") }

// Fields returns the fields of c. Their values set c.
func (c *Config) Fields() []Field {
	return []Field{
		{"control_socket", "unix socket of the control API; absolute path", &c.ControlSocket},
		{"control_group", "group whose members may use list, status and stats; empty for none", &c.ControlGroup},
		{"allow_mounts", "patterns of the sources and directories of mounts, separated by spaces; empty for all",
			&c.AllowMounts},
		{"metrics_listen", "ADDRESS:PORT of the HTTP listener for /metrics, /healthz and, on loopback, the " +
			"status page; empty for none", &c.MetricsListen},
		{"metrics_hosts", "host names in URLs of the HTTP listener, separated by spaces, beside addresses and " +
			"localhost", &c.MetricsHosts},
		{"log_level", "trace, debug, info, warn or error", &c.LogLevel},
		{"log_format", "text or json", &c.LogFormat},
		{"mount_options", "default mount options; the options of a mount override them", &c.MountOptions},
		{"nlm_listen", "ADDRESS:PORT for the callbacks of lock servers, TCP and UDP; empty for none", &c.NLMListen},
		{"state_dir", "directory for the owners of locks, absolute path; empty for none", &c.StateDir},
		{"connect_timeout", "timeout of a mount request", &c.ConnectTimeout},
		{"shutdown_timeout", "time to write dirty data and unmount all mounts when the daemon stops",
			&c.ShutdownTimeout},
		{"dirty_bytes", "bound of the data of all mounts that is not on stable storage", &c.DirtyBytes},
		{"connect_rate", "bound of RDMA connects per second to one address, after 16 at once; 0 for none",
			&c.ConnectRate},
		{"keep_mounts", "keep the mounts when the daemon is restarted or killed, for the next daemon: true or false",
			&c.KeepMounts},
		{"otlp_endpoint", "URL of an OpenTelemetry collector (OTLP/HTTP) for traces, such as " +
			"http://127.0.0.1:4318; empty for no traces", &c.OTLPEndpoint},
		{"otlp_ratio", "share of the requests that are traced, above 0 and at most 1", &c.OTLPRatio},
		{"inject", "fault injection plan, for tests: seed=S,disconnect-every=N,... (see docs/operator.md)",
			&c.Inject},
	}
}

// LoadConfig reads the TOML file at path over the defaults. An error has the file and, for an
// unknown key, the line.
func LoadConfig(path string) (Config, error) {
	c := DefaultConfig()
	data, err := os.ReadFile(path)
	if err != nil {
		return c, control.Errorf(control.CodeUsage, "read configuration: %w; set its path with --config", err)
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

// checkTypes refuses values that are not strings, and keys with capitals. The decoder would accept
// a number as nanoseconds. checkTypes leaves invalid TOML to the decoder.
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
			break // the configuration has no tables
		}
		if e.Kind != unstable.KeyValue {
			continue
		}
		it := e.Key()
		it.Next()
		key := it.Node()
		// The decoder ignores case.
		if right := strings.ToLower(string(key.Data)); right != string(key.Data) && hasKey(keys, right) {
			return control.Errorf(control.CodeUsage, "configuration %s:%d: unknown key %q; write it %s", path,
				p.Shape(key.Raw).Start.Line, key.Data, right)
		}
		if example, known := keys[string(key.Data)]; known && e.Value().Kind != unstable.String {
			return control.Errorf(control.CodeUsage, "configuration %s:%d: %s must be a string in quotes, such as %q",
				path,
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
	var unknown *toml.StrictMissingError
	if errors.As(err, &unknown) && len(unknown.Errors) > 0 {
		first := &unknown.Errors[0]
		row, _ := first.Position()
		return fmt.Sprintf("configuration %s:%d: unknown key %q; remove it, or see the keys in configs/nfsrdmad.toml",
			path, row, strings.Join(first.Key(), "."))
	}
	var decode *toml.DecodeError
	if errors.As(err, &decode) {
		row, col := decode.Position()
		return fmt.Sprintf("configuration %s:%d:%d: %s", path, row, col, strings.TrimPrefix(decode.Error(), "toml: "))
	}
	return fmt.Sprintf("configuration %s: %v", path, err)
}

// Check returns an error for the first invalid value. source is the origin of the values; the error
// names it.
func (c *Config) Check(source string) error {
	invalid := func(key string, value any, want string) error {
		return control.Errorf(control.CodeUsage, "configuration %s: %s = %q: %s", source, key, fmt.Sprint(value), want)
	}
	if !strings.HasPrefix(string(c.ControlSocket), "/") {
		return invalid("control_socket", c.ControlSocket, "must be an absolute path")
	}
	if _, err := control.LookupGroup(string(c.ControlGroup)); err != nil {
		return invalid("control_group", c.ControlGroup, err.Error())
	}
	if _, err := mount.ParseAllowed(string(c.AllowMounts)); err != nil {
		return invalid("allow_mounts", c.AllowMounts, err.Error())
	}
	if c.MetricsListen != "" {
		if _, err := net.ResolveTCPAddr("tcp", string(c.MetricsListen)); err != nil {
			return invalid("metrics_listen", c.MetricsListen, "must be ADDRESS:PORT or empty")
		}
	}
	if _, err := parseHosts(string(c.MetricsHosts)); err != nil {
		return invalid("metrics_hosts", c.MetricsHosts, err.Error())
	}
	if c.NLMListen != "" {
		if _, err := net.ResolveTCPAddr("tcp", string(c.NLMListen)); err != nil {
			return invalid("nlm_listen", c.NLMListen, "must be ADDRESS:PORT or empty")
		}
	}
	if c.StateDir != "" && !strings.HasPrefix(string(c.StateDir), "/") {
		return invalid("state_dir", c.StateDir, "must be an absolute path or empty")
	}
	switch c.LogLevel {
	case "trace", "debug", "info", "warn", "error":
	default:
		return invalid("log_level", c.LogLevel, "must be trace, debug, info, warn or error")
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		return invalid("log_format", c.LogFormat, "must be text or json")
	}
	if _, err := mount.ParseOptions(mount.DefaultOptions(), string(c.MountOptions)); err != nil {
		return invalid("mount_options", c.MountOptions, err.Error())
	}
	if _, err := mount.ParseFaults(string(c.Inject)); err != nil {
		return invalid("inject", c.Inject, err.Error())
	}
	for _, d := range []struct {
		key string
		v   Duration
	}{{"connect_timeout", c.ConnectTimeout}, {"shutdown_timeout", c.ShutdownTimeout}} {
		if d.v < Duration(time.Second) || d.v > Duration(control.MaxMountTimeout) {
			return invalid(d.key, d.v, "must be from 1s to "+control.MaxMountTimeout.String())
		}
	}
	if c.DirtyBytes < minDirtyBytes || c.DirtyBytes > maxDirtyBytes {
		return invalid("dirty_bytes", c.DirtyBytes, fmt.Sprintf("must be from %d to %d", minDirtyBytes, maxDirtyBytes))
	}
	if c.ConnectRate < 0 || c.ConnectRate > maxConnectRate {
		return invalid("connect_rate", c.ConnectRate, fmt.Sprintf("must be from 0 to %d", maxConnectRate))
	}
	if c.OTLPEndpoint != "" {
		if err := otlp.CheckEndpoint(string(c.OTLPEndpoint)); err != nil {
			return invalid("otlp_endpoint", c.OTLPEndpoint, err.Error())
		}
	}
	if err := otlp.CheckRatio(float64(c.OTLPRatio)); err != nil {
		return invalid("otlp_ratio", c.OTLPRatio, err.Error())
	}
	return nil
}

// Bounds of Config.DirtyBytes.
const minDirtyBytes, maxDirtyBytes = 1 << 20, 1 << 40

// maxConnectRate bounds Config.ConnectRate.
const maxConnectRate = 1_000_000

// Number is a number, such as "50".
type Number int64

func (n Number) String() string { return strconv.FormatInt(int64(n), 10) }

// Set parses a decimal number.
func (n *Number) Set(s string) error { return setNumber((*int64)(n), s, "a number") }

func setNumber(n *int64, s, what string) error {
	v, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return fmt.Errorf("%q: not %s", s, what)
	}
	*n = v
	return nil
}

// Type returns the name of the type in the help of a flag.
func (n *Number) Type() string { return "number" }

// UnmarshalText parses a TOML string.
func (n *Number) UnmarshalText(text []byte) error { return n.Set(string(text)) }

// Bytes is a number of bytes, such as "268435456".
type Bytes int64

func (b Bytes) String() string { return strconv.FormatInt(int64(b), 10) }

// Set parses a decimal number.
func (b *Bytes) Set(s string) error { return setNumber((*int64)(b), s, "a number of bytes") }

// Type returns the name of the type in the help of a flag.
func (b *Bytes) Type() string { return "bytes" }

// UnmarshalText parses a TOML string.
func (b *Bytes) UnmarshalText(text []byte) error { return b.Set(string(text)) }

// Ratio is a ratio, such as "0.001".
type Ratio float64

func (r Ratio) String() string { return strconv.FormatFloat(float64(r), 'g', -1, 64) }

// Set parses a decimal number.
func (r *Ratio) Set(s string) error {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return fmt.Errorf("%q: not a number such as 0.001", s)
	}
	*r = Ratio(v)
	return nil
}

// Type returns the name of the type in the help of a flag.
func (r *Ratio) Type() string { return "ratio" }

// UnmarshalText parses a TOML string.
func (r *Ratio) UnmarshalText(text []byte) error { return r.Set(string(text)) }

// Switch is a value "true" or "false".
type Switch bool

func (s *Switch) String() string { return strconv.FormatBool(bool(*s)) }

// Set parses "true" or "false".
func (s *Switch) Set(text string) error {
	if text != "true" && text != "false" {
		return fmt.Errorf("%q: must be true or false", text)
	}
	*s = text == "true"
	return nil
}

// Type returns the name of the type in the help of a flag.
func (s *Switch) Type() string { return "bool" }

// UnmarshalText parses a TOML string.
func (s *Switch) UnmarshalText(text []byte) error { return s.Set(string(text)) }

// Text is a string value.
type Text string

func (t *Text) String() string { return string(*t) }

// Set sets t to s.
func (t *Text) Set(s string) error { *t = Text(s); return nil }

// Type returns the name of the type in the help of a flag.
func (t *Text) Type() string { return "string" }

// Duration is a duration value such as "30s".
type Duration time.Duration

func (d Duration) String() string { return time.Duration(d).String() }

// Set parses a value in the syntax of time.ParseDuration.
func (d *Duration) Set(s string) error {
	v, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf("%q: not a duration such as 30s or 2m", s)
	}
	*d = Duration(v)
	return nil
}

// Type returns the name of the type in the help of a flag.
func (d *Duration) Type() string { return "duration" }

// UnmarshalText parses a TOML string.
func (d *Duration) UnmarshalText(b []byte) error { return d.Set(string(b)) }

// Std returns d as a time.Duration.
func (d Duration) Std() time.Duration { return time.Duration(d) }
