package softiwarp

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// capture records the loopback traffic of the server at addr while f runs, and returns the name of
// the file.
func capture(t *testing.T, addr netip.AddrPort, f func()) string {
	t.Helper()
	kit.NeedsRoot(t)
	dumpcap, err := exec.LookPath("dumpcap")
	if err != nil {
		t.Fatal("dumpcap is not installed; run make deps, or install wireshark-common")
	}
	if _, err := exec.LookPath("tshark"); err != nil {
		t.Fatal("tshark is not installed; run make deps, or install tshark")
	}
	file := filepath.Join(t.TempDir(), "siw.pcapng")
	filter := fmt.Sprintf("tcp port %d", addr.Port())
	cmd := exec.Command(dumpcap, "-q", "-i", "lo", "-B", "64", "-f", filter, "-w", file)
	stderr, err := cmd.StderrPipe()
	kit.Must(t, err)
	kit.Must(t, cmd.Start())
	lines := bufio.NewScanner(stderr)
	// wait for the start of the capture
	for lines.Scan() && !strings.HasPrefix(lines.Text(), "File:") {
	}
	f()
	// The capture is complete when it has the last packet.
	last, err := net.Dial("tcp", addr.String())
	kit.Must(t, err)
	defer last.Close()
	const mark = "the last packet of the capture"
	io.WriteString(last, mark)
	kit.Eventually(t, "last packet", func() bool {
		b, err := os.ReadFile(file)
		kit.Must(t, err)
		return bytes.Contains(b, []byte(mark))
	})
	cmd.Process.Signal(syscall.SIGINT)
	for lines.Scan() {
		if strings.Contains(lines.Text(), "dropped") {
			t.Log(lines.Text())
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("dumpcap: %v", err)
	}
	return file
}

// tshark returns what tshark prints about a capture. It recognizes MPA by its contents first: a
// reserved source port may be that of another protocol.
func tshark(t *testing.T, file string, args ...string) string {
	t.Helper()
	cmd := exec.Command("tshark", append([]string{"-n", "-r", file, "-o", "tcp.desegment_tcp_streams:TRUE",
		"-o", "tcp.try_heuristic_first:TRUE"}, args...)...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("tshark %q: %v\n%s", args, err, errs.String())
	}
	return string(out)
}

// TestTsharkDecodesStream checks that tshark decodes both directions as MPA, DDP and RDMAP, with
// valid CRCs and without malformed packets.
func TestTsharkDecodesStream(t *testing.T) {
	for _, cfg := range []Config{{}, {CRC: true, MaxFPDU: 1448}} {
		addr, endpoints := acceptAll(t, cfg)
		file := capture(t, addr, func() {
			d := newPair(t, cfg, addr, endpoints)
			r := newRPC(d, 100001)
			for range 3 {
				r.run()
			}
			// The connection ends with a Terminate that quotes a Read Request.
			d.b.run(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: 1, SGList: sges(8)})
			d.a.cause()
			d.a.id.Close()
			d.b.id.Close()
		})
		out := tshark(t, file, "-V")
		for _, bad := range []string{"Malformed", "Unreassembled", "Bad CRC32", "Bad length", "Dissector bug"} {
			if n := strings.Count(out, bad); n != 0 {
				t.Errorf("%+v: tshark reports %q %d times, want 0", cfg, bad, n)
			}
		}
		if cfg.CRC && strings.Count(out, "Good CRC32") < 20 {
			t.Errorf("%+v: valid CRCs: got %d, want at least 20", cfg, strings.Count(out, "Good CRC32"))
		}
		for op, want := range map[string]int{"Write": 3, "Read Request": 4, "Read Response": 3, "Send": 4,
			"Send with Invalidate": 3, "Terminate": 1} {
			if n := strings.Count(out, "OpCode: "+op+" ("); n < want {
				t.Errorf("%+v: RDMAP messages with opcode %s: got %d, want at least %d", cfg, op, n, want)
			}
		}
	}
}
