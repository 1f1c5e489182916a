// Package server runs this project's server in another process, for tests that measure the
// client: its memory or its processor time.
package server

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// dirEnv is set in the process of a server: its directory and its directory for state.
const dirEnv, stateEnv = "NFSRDMAD_SERVERTEST_DIR", "NFSRDMAD_SERVERTEST_STATE"

// A Server exports a directory, without root squash, by NFS/RDMA and by TCP.
type Server struct {
	Dir      string
	RDMAAddr netip.AddrPort
	TCPAddr  string // of MOUNT and NFS
}

// Main serves and exits if this process is a server of Start. TestMain must call it first.
func Main() {
	dir := os.Getenv(dirEnv)
	if dir == "" {
		return
	}
	if err := serve(dir, os.Getenv(stateEnv)); err != nil {
		fmt.Fprintln(os.Stderr, "server:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serve(dir, state string) error {
	s, err := nfsserve.Run(context.Background(), nfsserve.Config{Dir: dir, RDMAListen: "127.0.0.1:0",
		TCPListen: "127.0.0.1:0", StateDir: state, NoRootSquash: true,
		AllowSUID: true, Provider: softiwarp.New(softiwarp.Config{})})
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(Server{dir, s.RDMAAddr, s.TCPAddr}); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
	return s.Close()
}

// Start starts a server of a new directory, until the test ends.
func Start(t testing.TB) *Server {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), dirEnv+"="+t.TempDir(), stateEnv+"="+t.TempDir())
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("server process: %v", err)
		}
	})
	s := &Server{}
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, s)
	}
	if err != nil {
		t.Fatalf("server process: %v", err)
	}
	return s
}
