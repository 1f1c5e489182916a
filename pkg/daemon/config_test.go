package daemon

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

const shippedConfig = "../../configs/nfsrdmad.toml"

// The keys of Config, of Fields and of the shipped file must be the same. The file shows the
// defaults.
func TestShippedConfigHasDefaults(t *testing.T) {
	c := DefaultConfig()
	var inStruct, inFields []string
	for f := range reflect.TypeFor[Config]().Fields() {
		inStruct = append(inStruct, f.Tag.Get("toml"))
	}
	for _, f := range c.Fields() {
		inFields = append(inFields, f.Key)
	}
	if !reflect.DeepEqual(inStruct, inFields) {
		t.Errorf("keys of Fields: got %v, want %v", inFields, inStruct)
	}
	data, err := os.ReadFile(shippedConfig)
	if err != nil {
		t.Fatal(err)
	}
	var raw map[string]any
	if err := toml.Unmarshal(data, &raw); err != nil {
		t.Fatal(err)
	}
	for _, f := range c.Fields() {
		v, ok := raw[f.Key]
		if !ok {
			t.Errorf("%s: missing key %s", shippedConfig, f.Key)
		} else if v != f.Value.String() {
			t.Errorf("%s: got %s = %v, want the default %s", shippedConfig, f.Key, v, f.Value)
		}
		delete(raw, f.Key)
	}
	if len(raw) != 0 {
		t.Errorf("%s: unknown keys %v", shippedConfig, raw)
	}
	loaded, err := LoadConfig(shippedConfig)
	if err != nil || loaded != c {
		t.Errorf("shipped configuration: got %+v and error %v, want the defaults", loaded, err)
	}
}

func TestFlagAndKeySetSameField(t *testing.T) {
	values := map[string]string{"control_socket": "/x/y", "control_group": "daemon",
		"allow_mounts": "nas:/home/** /mnt/*", "metrics_listen": "127.0.0.1:1",
		"metrics_hosts": "node1.example node1", "log_level": "warn",
		"log_format": "json", "nlm_listen": "127.0.0.1:4045", "state_dir": "/x",
		"mount_options": "soft", "connect_timeout": "1m0s", "shutdown_timeout": "2s", "dirty_bytes": "2000000",
		"connect_rate": "7", "keep_mounts": "false",
		"otlp_endpoint": "https://otel.example:4318/x", "otlp_ratio": "0.25", "inject": "seed=1,lose-reply=~9"}
	for key, v := range values {
		path := filepath.Join(t.TempDir(), "c.toml")
		if err := os.WriteFile(path, []byte(key+" = \""+v+"\"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		fromFile, err := LoadConfig(path)
		if err != nil {
			t.Fatal(err)
		}
		fromFlag := DefaultConfig()
		for _, f := range fromFlag.Fields() {
			if f.Key == key {
				if err := f.Value.Set(v); err != nil {
					t.Fatal(err)
				}
			}
		}
		if fromFile != fromFlag || fromFile == DefaultConfig() {
			t.Errorf("%s: got %+v from the file and %+v from the flag, want the same change", key, fromFile, fromFlag)
		}
	}
	if n := len((&Config{}).Fields()); n != len(values) {
		t.Errorf("fields tested: got %d, want %d", len(values), n)
	}
}

func TestConfigErrors(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"unknown key", "log_level = \"info\"\n\nlog_size = \"red\"\n", `c.toml:3: unknown key "log_size"`},
		{"unknown table", "[mounts]\na = 1\n", `c.toml:1: unknown key "mounts"`},
		{"syntax", "log_level = \n", "c.toml:1:"},
		{"type", "log_level = 7\n", "c.toml:1: log_level must be a string"},
		{"bare number", "# half a minute\nconnect_timeout = 30\n", "c.toml:2: connect_timeout must be a string"},
		{"list", "mount_options = [\"soft\"]\n", "c.toml:1: mount_options must be a string"},
		{"duration", "connect_timeout = \"soon\"\n", "soon"},
		{"duration range", "connect_timeout = \"1h\"\n", "connect_timeout"},
		{"dirty bytes", "dirty_bytes = \"1k\"\n", "1k"},
		{"dirty bytes range", "dirty_bytes = \"0\"\n", "dirty_bytes"},
		{"bare dirty bytes", "dirty_bytes = 1000000\n", "c.toml:1: dirty_bytes must be a string"},
		{"connect rate", "connect_rate = \"fast\"\n", "not a number"},
		{"connect rate range", "connect_rate = \"-1\"\n", "must be from 0"},
		{"switch", "keep_mounts = \"no\"\n", "must be true or false"},
		{"bare switch", "keep_mounts = false\n", "c.toml:1: keep_mounts must be a string"},
		{"endpoint", "otlp_endpoint = \"127.0.0.1:4318\"\n", "must be a URL such as http://127.0.0.1:4318"},
		{"ratio", "otlp_ratio = \"all\"\n", `"all": not a number such as 0.001`},
		{"ratio range", "otlp_ratio = \"1.5\"\n", `otlp_ratio = "1.5": must be above 0 and at most 1`},
		{"bare ratio", "otlp_ratio = 0.5\n", "c.toml:1: otlp_ratio must be a string"},
		{"level", "log_level = \"loud\"\n", "log_level"},
		{"format", "log_format = \"xml\"\n", "log_format"},
		{"socket", "control_socket = \"here\"\n", "absolute"},
		{"group", "control_group = \"no-such-group\"\n", `unknown group "no-such-group"; create it with groupadd`},
		{"allowed mounts", "allow_mounts = \"mnt/*\"\n", `allow_mounts = "mnt/*": "mnt/*" is neither`},
		{"metrics", "metrics_listen = \"nowhere\"\n", "metrics_listen"},
		{"metrics hosts", "metrics_hosts = \"a b:9620\"\n", `"b:9620" must be a host name without a port`},
		{"unknown fault", "inject = \"disconnect-evry=9\"\n", `"disconnect-evry=9"`},
		{"known faults", "inject = \"seed=1,gremlins=9\"\n", "known words are seed=S, disconnect-every=N,"},
		{"no fault", "inject = \"seed=1\"\n", "injects nothing"},
		{"options", "mount_options = \"hard,soft\"\n", `contradicts "hard"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "c.toml")
			if err := os.WriteFile(path, []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := LoadConfig(path)
			if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), path) {
				t.Fatalf("got error %v, want the path and %q", err, tt.want)
			}
			if strings.Contains(err.Error(), "\n") || control.ExitCode(err) != control.ExitUsage {
				t.Errorf("got exit code %d and error %q, want %d and one line", control.ExitCode(err), err,
					control.ExitUsage)
			}
		})
	}
	if _, err := LoadConfig("/nonexistent.toml"); err == nil || !strings.Contains(err.Error(), "/nonexistent.toml") {
		t.Errorf("missing file: got error %v, want its path", err)
	}
}

func TestDurationSet(t *testing.T) {
	var d Duration
	if err := d.Set("90s"); err != nil || time.Duration(d) != 90*time.Second || d.String() != "1m30s" {
		t.Errorf("duration: got %v and error %v, want 1m30s", d, err)
	}
}
