package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/demo"
	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

func serveCommand() *cobra.Command {
	var cfg nfsserve.Config
	var level, inject string
	var allow []string
	limits := serveLimits{connections: svcrdma.DefaultMaxConns, memory: svcrdma.DefaultMessageMemory >> 20}
	cmd := &cobra.Command{
		Use:   "serve DIR | --backend HOST:PORT",
		Short: "Serve a directory, or an NFSv3 server on TCP, over RDMA",
		Long:  serveHelp,
		Args:  argCount(0, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg.Dir = append(args, "")[0]
			var err error
			if cfg.Allow, err = parseAllow(allow); err != nil {
				return err
			}
			if cmd.Flags().Changed("allow") && len(cfg.Allow) == 0 {
				return errors.New("invalid --allow \"\": use ADDRESS or ADDRESS/BITS")
			}
			if err := limits.apply(&cfg.RDMA); err != nil {
				return err
			}
			plan, err := mount.ParseFaults(inject)
			if err != nil {
				return err
			}
			log := daemon.DefaultConfig()
			log.LogLevel = daemon.Text(level)
			if err := log.Check("from flags"); err != nil {
				return err
			}
			cfg.Logger = daemon.NewLogger(log, os.Stderr)
			cfg.Provider = mount.WithFaults(softiwarp.New(softiwarp.Config{}), plan, cfg.Logger)
			prepareService()
			return runServer(cmd.Context(), cfg, func(s *nfsserve.Server) {
				printServing(cmd.OutOrStdout(), &cfg, s)
				if plan != nil {
					fmt.Fprintf(cmd.OutOrStdout(), "%s%s\n", control.FaultBanner, plan)
				}
			})
		},
	}
	cmd.Flags().StringVar(&cfg.Backend, "backend", "",
		"relay to the NFSv3 server at `HOST:PORT` on TCP, whose export rules then apply to this host and not to the "+
			"clients: restrict the clients with --allow")
	cmd.Flags().StringVar(&cfg.RDMAListen, "rdma-listen", nfsserve.DefaultRDMAListen,
		"accept NFS over RDMA at `ADDRESS:PORT`; no ADDRESS means all addresses of this host")
	cmd.Flags().StringVar(&cfg.TCPListen, "tcp-listen", nfsserve.DefaultTCPListen,
		"accept MOUNT, NFS and port mapper calls over TCP at `ADDRESS:PORT`; no ADDRESS means all addresses of "+
			"this host")
	cmd.Flags().StringSliceVar(&allow, "allow", nil,
		"serve only clients in `CIDR,...`, over RDMA and TCP; can be repeated (default all)")
	cmd.Flags().BoolVar(&cfg.ReadOnly, "read-only", false, "refuse every change of the directory")
	cmd.Flags().BoolVar(&cfg.NoRootSquash, "no-root-squash", false,
		"run calls of uid 0 as root; by default uid 0 and gid 0 become 65534")
	cmd.Flags().BoolVar(&cfg.AllowSUID, "allow-suid", false,
		"let clients set the set-user-ID and set-group-ID bits of files")
	cmd.Flags().BoolVar(&cfg.Insecure, "insecure", false,
		"serve clients whose source port is 1024 or higher, such as those of unprivileged users and of rdma-core")
	cmd.Flags().IntVar(&limits.connections, "max-connections", limits.connections,
		"maximum number of RDMA connections; one client address gets at most half of them")
	cmd.Flags().IntVar(&limits.memory, "message-memory", limits.memory,
		"memory in `MiB` for the calls and replies of all RDMA connections; further calls wait")
	for _, name := range []string{"tcp-listen", "read-only", "no-root-squash", "allow-suid"} {
		cmd.MarkFlagsMutuallyExclusive("backend", name)
	}
	cmd.Flags().StringVar(&inject, "inject", "",
		"break connections on purpose, for tests: seed=S,disconnect-every=N,... (see docs/operator.md)")
	cmd.Flags().StringVar(&level, "log-level", "info", "trace, debug, info, warn or error")
	return cmd
}

const serveHelp = `Serve a directory, or an NFSv3 server on TCP, over RDMA.

By default only clients on this host can connect, root is squashed, and calls
need a source port below 1024, so that a local user cannot act as another one.
Run the server as root to act for different users; otherwise every client acts
as the user who runs it. File systems that are mounted below DIR are not served.
File handles stay valid when the server restarts: their key is kept in
$STATE_DIRECTORY, else in /var/lib/nfsrdmad or the user's state directory.

With --backend, the NFS server behind the relay sees every call from this host.
It applies the rules of its export to this host, so every client gets the access
that this host has. The relay uses a source port below 1024 for clients that do.
Only --allow, the listen address and a firewall decide which clients can
connect.`

// parseAllow reads the addresses and networks of --allow.
func parseAllow(list []string) (nets []netip.Prefix, err error) {
	for _, text := range list {
		p, err := netip.ParsePrefix(text)
		if a, aErr := netip.ParseAddr(text); aErr == nil {
			p, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		if err != nil {
			return nil, fmt.Errorf("invalid --allow %q: use ADDRESS or ADDRESS/BITS", text)
		}
		if a := p.Addr(); a.Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
		}
		nets = append(nets, p.Masked())
	}
	return nets, nil
}

// runServer runs a server until ctx ends. It calls started once the server listens.
func runServer(ctx context.Context, cfg nfsserve.Config, started func(*nfsserve.Server)) error {
	unix.Umask(0) // the clients apply theirs, and default ACLs replace it
	s, err := nfsserve.Run(ctx, cfg)
	var usage *nfsserve.ConfigError
	switch {
	case errors.As(err, &usage):
		return &control.Error{Code: control.CodeUsage, Text: err.Error(), Err: err}
	case err != nil:
		return control.Errorf(control.CodeSystem, "serve: %w", err)
	}
	started(s)
	if err := s.Wait(); err != nil && ctx.Err() == nil {
		return control.Errorf(control.CodeSystem, "serve: %w", err)
	}
	return nil
}

// serveLimits are what a server may take of its host.
type serveLimits struct{ connections, memory int }

// Bounds of serveLimits: a client needs one connection of the two, a call two messages of a little
// more than 1 MiB.
const (
	minConnections, maxConnections = 2, 65536
	minMemory, maxMemory           = 4, 1 << 20 // MiB
)

func (l serveLimits) apply(cfg *svcrdma.Config) error {
	if l.connections < minConnections || l.connections > maxConnections {
		return fmt.Errorf("flag --max-connections=%d: must be from %d to %d", l.connections, minConnections,
			maxConnections)
	}
	if l.memory < minMemory || l.memory > maxMemory {
		return fmt.Errorf("flag --message-memory=%d: must be from %d to %d (MiB)", l.memory, minMemory, maxMemory)
	}
	cfg.MaxConns, cfg.MessageMemory = l.connections, l.memory<<20
	return nil
}

// printServing says where the server is, and how a directory is mounted from this host.
func printServing(w io.Writer, cfg *nfsserve.Config, s *nfsserve.Server) {
	if cfg.Backend != "" {
		fmt.Fprintf(w, "serving RDMA on %s, for the NFS server at TCP %s\n", s.RDMAAddr, s.TCPAddr)
		return
	}
	fmt.Fprintf(w, "serving RDMA on %s, MOUNT and NFS on TCP %s\n", s.RDMAAddr, s.TCPAddr)
	tcp, err := netip.ParseAddrPort(s.TCPAddr)
	if err != nil {
		return
	}
	root := mount.Spec{Host: "localhost", Export: "/"}
	switch r, m := s.RDMAAddr.Addr(), tcp.Addr(); { // a mount has one name for both
	case !r.IsUnspecified() && !m.IsUnspecified() && r != m:
		return
	case !m.IsUnspecified():
		root.Host = m.String()
	case !r.IsUnspecified():
		root.Host = r.String()
	}
	var options []string
	if p := s.RDMAAddr.Port(); p != mount.DefaultOptions().Port {
		options = append(options, fmt.Sprintf("port=%d", p))
	}
	if p := tcp.Port(); p != portMapper && p != mountPort {
		options = append(options, fmt.Sprintf("mountport=%d", tcp.Port()))
	}
	line := fmt.Sprintf("to mount it: nfsrdmad mount %s DIR", root)
	if len(options) > 0 {
		line += " -o " + strings.Join(options, ",")
	}
	fmt.Fprintln(w, line)
}

// Ports at which clients find MOUNT without mountport=. The TCP port of a directory also answers as
// a port mapper.
const (
	portMapper = 111   // RFC 1833 §3.2
	mountPort  = 20048 // assigned by IANA; clients try it if the port mapper does not know MOUNT
)

func demoCommand() *cobra.Command {
	cfg := demo.Config{}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Copy a tree through a mount of an embedded server, and compare",
		Args:  argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.MaxFiles < 1 {
				return fmt.Errorf("flag --files=%d: must be 1 or more", cfg.MaxFiles)
			}
			cfg.Out = cmd.OutOrStdout()
			return demo.Run(cmd.Context(), cfg)
		},
	}
	cmd.Flags().StringVar(&cfg.Source, "source", "", "tree to copy (default: Go's own source)")
	cmd.Flags().IntVar(&cfg.MaxFiles, "files", demo.DefaultMaxFiles, "copy at most so many files")
	cmd.Flags().StringVar(&cfg.Options, "options", "", "mount options")
	cmd.Flags().DurationVar(&cfg.Timeout, "timeout", 55*time.Second, "give up after this time")
	return cmd
}
