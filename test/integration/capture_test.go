package integration

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
)

// embedded returns the MOUNT arguments of an embedded server.
func embedded(t *testing.T, s *nfsserve.Server) mountd.Args {
	t.Helper()
	host, port, err := net.SplitHostPort(s.TCPAddr)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	return mountd.Args{Host: host, Port: n, Export: "/"}
}

// capture writes the packets of a TCP port of the loopback device to file until stop is called.
func capture(t *testing.T, port uint16, file string) (stop func()) {
	t.Helper()
	cmd := exec.Command("dumpcap", "-q", "-i", "lo", "-f", fmt.Sprintf("tcp port %d", port), "-B", "256", "-w", file)
	var stderr bytes.Buffer
	pipe, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("start dumpcap: %v; install the Debian package wireshark-common", err)
	}
	ready := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		sc := bufio.NewScanner(pipe)
		for first := true; sc.Scan(); {
			stderr.WriteString(sc.Text() + "\n")
			if first && strings.Contains(sc.Text(), "File:") {
				first = false
				close(ready)
			}
		}
	}()
	select {
	case <-ready:
	case <-ended:
		t.Fatalf("dumpcap exited:\n%s", stderr.String())
	case <-time.After(20 * time.Second):
		t.Fatal("dumpcap did not start within 20 s")
	}
	return func() {
		time.Sleep(time.Second) // the kernel delivers packets late
		cmd.Process.Signal(os.Interrupt)
		<-ended
		cmd.Wait()
		if s := stderr.String(); !strings.Contains(s, "dropped on interface") || !strings.Contains(s, "/0 ") {
			t.Fatalf("capture lost packets:\n%s", s)
		}
	}
}

// TestCaptureDecodes lets tshark decode all packets of a run with CRCs.
func TestCaptureDecodes(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	front := serve(t, nfsserve.Config{Dir: t.TempDir(), TCPListen: "127.0.0.1:0"})
	file := filepath.Join(t.TempDir(), "run.pcapng")
	stop := capture(t, front.RDMAAddr.Port(), file)
	src := goTree(t, "net/http")
	m := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: embedded(t, front), crc: true})
	run(t, "", "cp", "-a", src, m.dir)
	cold := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: embedded(t, front), crc: true})
	run(t, "", "diff", "-r", src, filepath.Join(cold.dir, "http"))
	stop()

	// tshark does not insert the data of RDMA Writes into the NFS reply, so that every READ with a
	// write chunk would look truncated. The test therefore disables the decoder of NFS.
	tshark := func(args ...string) string {
		cmd := exec.Command("tshark", append([]string{"-r", file, "-o", "tcp.desegment_tcp_streams:TRUE",
			"--disable-protocol", "nfs"}, args...)...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("tshark %v: %v\n%s", args, err, stderr.String())
		}
		return string(out)
	}
	if out := tshark("-Y", "_ws.malformed || _ws.unreassembled || _ws.short"); out != "" {
		t.Errorf("malformed or unreassembled packets:\n%.2000s", out)
	}
	text := tshark("-Y", "iwarp_mpa.crc_check", "-V", "-O", "iwarp_mpa")
	good, bad := strings.Count(text, "(Good CRC32)"), strings.Count(text, "(Bad CRC32")
	if bad != 0 || good < 100 {
		t.Errorf("got %d wrong and %d right CRCs, want 0 wrong and at least 100 right", bad, good)
	}
	for _, what := range []string{"iwarp_mpa.req", "iwarp_mpa.rep", "iwarp_ddp.tagged", "iwarp_rdma.rr",
		"iwarp_rdma.inval_stag != 0", "rpcordma"} {
		if n := strings.Count(tshark("-Y", what), "\n"); n == 0 {
			t.Errorf("tshark decoded no packet as %s", what)
		}
	}
	t.Logf("%d FPDUs with right CRCs", good)
}
