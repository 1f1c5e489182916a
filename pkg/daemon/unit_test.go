package daemon

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const unitFile = "../../deploy/systemd/nfsrdmad.service"

// The program of the unit need not be installed: the test verifies the unit with its own path.
func TestUnitVerifies(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Fatal("systemd-analyze not found; install it with apt-get install systemd")
	}
	unit, err := os.ReadFile(unitFile)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	verify := func(text string) (string, error) {
		path := filepath.Join(t.TempDir(), "nfsrdmad.service")
		if err := os.WriteFile(path, []byte(strings.Replace(text, "/usr/sbin/nfsrdmad", self, 1)), 0o644); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command("systemd-analyze", "verify", "--man=no", path).CombinedOutput()
		return string(out), err
	}
	out, err := verify(string(unit))
	if err != nil || strings.Contains(out, "nfsrdmad.service") {
		t.Errorf("systemd-analyze verify: %v: %s", err, out)
	}
	if out, err := verify(string(unit) + "\n[Service]\nFrobnicate=yes\n"); err == nil &&
		!strings.Contains(out, "Frobnicate") {
		t.Error("systemd-analyze verify accepts an unknown key; it does not check the unit")
	}
}

// systemd must not kill the daemon while it writes dirty data with the default configuration.
func TestUnitStopTimeout(t *testing.T) {
	unit, err := os.ReadFile(unitFile)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^TimeoutStopSec=(\d+)$`).FindSubmatch(unit)
	if m == nil {
		t.Fatal("unit: no TimeoutStopSec in seconds")
	}
	seconds, _ := strconv.Atoi(string(m[1]))
	if stop := stopTime(DefaultConfig()); time.Duration(seconds)*time.Second <= stop {
		t.Errorf("TimeoutStopSec: got %d s, want more than %v", seconds, stop)
	}
}

// operatorDoc states the exposure of the unit and justifies each setting that contributes to it.
const operatorDoc = "../../docs/operator.md"

// A securityLine is a line of "systemd-analyze security --json=short".
type securityLine struct {
	Name     string  `json:"name"`
	Exposure *string `json:"exposure"` // null for none
}

// The exposure that systemd-analyze computes must not exceed the one that the documentation states.
// The documentation must also name each setting that contributes. A daemon that mounts for other
// processes needs CAP_SYS_ADMIN, mount(2), the network, and the mount namespace of the host.
func TestUnitExposure(t *testing.T) {
	doc, err := os.ReadFile(operatorDoc)
	if err != nil {
		t.Fatal(err)
	}
	stated := regexp.MustCompile(`exposure of\s+(\d+)\.(\d)\s`).FindSubmatch(doc)
	if stated == nil {
		t.Fatalf("%s states no exposure", operatorDoc)
	}
	tenths := string(stated[1]) + string(stated[2])
	analyze := func(args ...string) ([]byte, error) {
		return exec.Command("systemd-analyze", append([]string{"security", "--offline=true", "--no-pager"},
			args...)...).Output()
	}
	if out, err := analyze("--threshold="+tenths, unitFile); err != nil {
		t.Errorf("exposure: more than the stated %s tenths: %v: %s", tenths, err, out)
	}
	out, err := analyze("--json=short", unitFile)
	if err != nil {
		t.Fatalf("systemd-analyze security: %v", err)
	}
	var lines []securityLine
	if err := json.Unmarshal(out, &lines); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	contribute := 0
	for _, l := range lines {
		if l.Exposure == nil || *l.Exposure == "" {
			continue
		}
		contribute++
		name := strings.ReplaceAll(l.Name, "|", `\|`) // in a table
		if !strings.Contains(string(doc), "`"+name+"`") {
			t.Errorf("%s does not justify %s, which has exposure %s", operatorDoc, l.Name, *l.Exposure)
		}
	}
	if contribute < 10 {
		t.Errorf("settings with exposure: got %d, want those of the unit", contribute)
	}
}

// Each capability of the unit must be one that the daemon keeps and that the documentation
// justifies. LimitMEMLOCK= makes CAP_IPC_LOCK unnecessary.
func TestUnitCapabilities(t *testing.T) {
	unit, err := os.ReadFile(unitFile)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile(operatorDoc)
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, c := range neededCapabilities {
		if !strings.Contains(string(doc), "| "+c.name+" |") {
			t.Errorf("%s does not justify %s", operatorDoc, c.name)
		}
		if c.number != unix.CAP_IPC_LOCK {
			want = append(want, c.name)
		}
	}
	line := "\nCapabilityBoundingSet=" + strings.Join(want, " ") + "\n"
	if !strings.Contains(string(unit), line) {
		t.Errorf("unit: want line %q", line)
	}
}

// In a private mount namespace the mounts of the daemon would be invisible to the host.
func TestUnitKeepsMountNamespaceOfHost(t *testing.T) {
	unit, err := os.ReadFile(unitFile)
	if err != nil {
		t.Fatal(err)
	}
	private := regexp.MustCompile(`(?m)^(ProtectSystem|ProtectHome|PrivateTmp|PrivateDevices|PrivateMounts|` +
		`ProtectKernel\w+|ProtectControlGroups|ProtectProc|ReadWritePaths|ReadOnlyPaths|InaccessiblePaths|` +
		`TemporaryFileSystem|BindPaths|RootDirectory|DynamicUser|PrivateUsers|MountFlags)=`)
	if m := private.FindString(string(unit)); m != "" {
		t.Errorf("unit: got %s, want no private mount namespace", m)
	}
	for _, want := range []string{"Type=notify", "ExecStart=/usr/sbin/nfsrdmad daemon --config /etc/nfsrdmad.toml",
		"RuntimeDirectory=nfsrdmad", "Restart=on-failure", "DeviceAllow=/dev/fuse rw",
		"DeviceAllow=/dev/infiniband/rdma_cm rw", "DeviceAllow=char-infiniband_verbs rw", "LimitMEMLOCK=infinity",
		"OOMScoreAdjust=-900", "NotifyAccess=main", "KillMode=process", "RuntimeDirectoryPreserve=restart",
		"StartLimitIntervalSec=0", "LimitCORE=0"} {
		if !strings.Contains(string(unit), "\n"+want+"\n") {
			t.Errorf("unit: missing line %s", want)
		}
	}
}

// The unit must keep the descriptors of many mounts, allow D-Bus, and not keep descriptors after a
// stop.
func TestUnitKeepsDescriptors(t *testing.T) {
	unit, err := os.ReadFile(unitFile)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^FileDescriptorStoreMax=(\d+)$`).FindSubmatch(unit)
	if m == nil {
		t.Fatal("unit: no FileDescriptorStoreMax")
	}
	const mounts = 100
	if n, _ := strconv.Atoi(string(m[1])); n < 3*mounts+2 {
		t.Errorf("FileDescriptorStoreMax: got %d, want places for %d mounts", n, mounts)
	}
	if strings.Contains(string(unit), "\nFileDescriptorStorePreserve=") {
		t.Error("unit: got FileDescriptorStorePreserve, want the default no")
	}
	if !regexp.MustCompile(`(?m)^RestrictAddressFamilies=.*\bAF_UNIX\b`).Match(unit) {
		t.Error("unit: RestrictAddressFamilies without AF_UNIX, which D-Bus needs")
	}
}
