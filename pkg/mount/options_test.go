package mount

import (
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

func TestParseOptions(t *testing.T) {
	tests := []struct {
		list   string
		change func(*Options)
	}{
		{"", func(*Options) {}},
		{"vers=3,proto=rdma,sec=sys,intr,mountproto=tcp,hard,rw,lock", func(*Options) {}},
		{"nolock,local_lock=all", func(o *Options) { o.LocalLock = "all" }},
		{"lock,local_lock=flock", func(o *Options) { o.LocalLock = "flock" }},
		{"local_lock=posix,nlmport=4045", func(o *Options) { o.LocalLock, o.LockPort = "posix", 4045 }},
		{"defaults,_netdev,x-systemd.automount,async,fg,nofail,noauto", func(*Options) {}},
		{"user,user=me,users,owner,group,nouser", func(*Options) {}},
		{"port=1,mountport=65535", func(o *Options) { o.Port, o.MountPort = 1, 65535 }},
		{"rsize=4096,wsize=1048576", func(o *Options) { o.RSize, o.WSize = 4096, 1<<20 }},
		// nfs(5): sizes are rounded down to a multiple of 1024
		{"rsize=10000", func(o *Options) { o.RSize = 9216 }},
		{"timeo=15,retrans=0,soft", func(o *Options) {
			o.Timeout, o.Retrans, o.Recovery = 1500*time.Millisecond, 0,
				RecoverySoft
		}},
		{"softerr", func(o *Options) { o.Recovery = RecoverySoftErr }},
		{"actimeo=0", func(o *Options) { o.AcRegMin, o.AcRegMax, o.AcDirMin, o.AcDirMax = 0, 0, 0, 0 }},
		{"acregmin=1,acregmax=2,acdirmin=3,acdirmax=4", func(o *Options) {
			o.AcRegMin, o.AcRegMax, o.AcDirMin, o.AcDirMax = time.Second, 2*time.Second, 3*time.Second, 4*time.Second
		}},
		{"nocto", func(o *Options) { o.NoCTO = true }},
		{"writeback", func(o *Options) { o.Writeback = true }},
		{"noac,lookupcache=positive", func(o *Options) { o.NoAC, o.LookupCache = true, "pos" }},
		{"sharednames", func(o *Options) { o.SharedNames = true }},
		{"nconnect=16,ro", func(o *Options) { o.NConnect, o.ReadOnly = 16, true }},
		{"remoteports=192.0.2.1-192.0.2.2~2001:db8::1", func(o *Options) {
			o.RemotePorts = addrList{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"),
				netip.MustParseAddr("2001:db8::1")}
		}},
		{"provider=rdmacore,device=rxe0,slots=4,inline=1024,mpacrc=on,writepad", func(o *Options) {
			o.Provider, o.Device, o.Slots, o.InlineBytes, o.MPACRC, o.WritePad = "rdmacore", "rxe0", 4, 1024, true, true
		}},
		{"noresvport", func(o *Options) { o.NoResvPort = true }},
		{"trace=65536,keepalive=3,idle=60", func(o *Options) {
			o.TraceEvents, o.KeepAlive, o.Idle = 65536,
				3*time.Second, time.Minute
		}},
		{"noatime,nodiratime", func(o *Options) { o.Kernel = []string{"nosuid", "nodev", "noatime", "nodiratime"} }},
		{"atime,relatime,norelatime,nostrictatime,diratime", func(*Options) {}},
		{"dirty_expire=0,dirty_bytes=1048576", func(o *Options) { o.DirtyExpire, o.DirtyBytes = 0, 1<<20 }},
		{"", func(o *Options) { o.Kernel = []string{"nosuid", "nodev"} }},
		{"suid", func(o *Options) { o.Kernel = []string{"nodev"} }},
		{"suid,dev,defaults", func(o *Options) { o.Kernel = []string{} }},
		{"allow_dev", func(o *Options) { o.Kernel = []string{"nosuid"} }},
		{"allow_suid,suid,allow_dev", func(o *Options) { o.Kernel = []string{} }},
	}
	for _, tt := range tests {
		t.Run(tt.list, func(t *testing.T) {
			want := DefaultOptions()
			tt.change(&want)
			got, err := ParseOptions(DefaultOptions(), tt.list)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("options: got %+v, want %+v", got, want)
			}
			back, err := ParseOptions(DefaultOptions(), got.String())
			if err != nil || !reflect.DeepEqual(back, got) {
				t.Errorf("parse of %q: got %+v and error %v, want the same options", got, back, err)
			}
		})
	}
}

func TestParseOptionsErrors(t *testing.T) {
	for _, tt := range []struct{ list, option, want string }{
		{"rw,frobnicate", `"frobnicate"`, "unknown"},
		{"vers=4", `"vers=4"`, "must be 3"},
		{"port=0", `"port=0"`, "1 to 65535"},
		{"port", `"port"`, "needs a value"},
		{"rsize=4095", `"rsize=4095"`, "4096 to 1048576"},
		{"timeo=0", `"timeo=0"`, "1 to 36000"},
		{"nconnect=17", `"nconnect=17"`, "1 to 16"},
		{"remoteports", `"remoteports"`, "addresses and ranges FIRST-LAST"},
		{"remoteports=dns", `"remoteports=dns"`, "list the addresses"},
		{"remoteports=192.0.2.1-9", `"remoteports=192.0.2.1-9"`, `"9" is not an IP address`},
		{"remoteports=::1,remoteports=::2", `"remoteports=::2"`, `contradicts "remoteports=::1"`},
		{"inline=1500", `"inline=1500"`, "multiple of 1024"},
		{"lookupcache=some", `"lookupcache=some"`, "all, none, pos or positive"},
		{"local_lock=some", `"local_lock=some"`, "must be all, flock, posix or none"},
		{"lock,nolock", `"nolock"`, `contradicts "lock"`},
		{"nolock,local_lock=none", `"local_lock=none"`, `contradicts "nolock"`},
		{"nlmport=20049", `"nlmport=20049"`, "port=20049"},
		{"sec=krb5", `"sec=krb5"`, "must be sys"},
		{"provider=softiwarp,device=rxe0", `"device=rxe0"`, "provider=softiwarp"},
		{"device=", `"device"`, "needs a value"},
		{"ro=1", `"ro=1"`, "takes no value"},
		{"keepalive=1h", `"keepalive=1h"`, "0 to 3600 (seconds"},
		{"dirty_bytes=0", `"dirty_bytes=0"`, "1048576 to 1073741824 (bytes"},
		{"hard,soft", `"soft"`, `contradicts "hard"`},
		{"writeback,nowriteback", `"nowriteback"`, `contradicts "writeback"`},
		{"writeback,noac", `"writeback"`, `contradicts "noac"`},
		{"noatime,strictatime", `"strictatime"`, `contradicts "noatime"`},
		{"port=1,port=2", `"port=2"`, `contradicts "port=1"`},
		{"actimeo=5,acregmin=3", `"acregmin=3"`, `contradicts "actimeo=5"`},
		{"noac,actimeo=3", `"actimeo=3"`, `contradicts "noac"`},
		{"mountport=20049", `"mountport=20049"`, "port=20049"},
		{"acregmin=61", `"acregmin=61"`, "acregmax=60"},
	} {
		t.Run(tt.list, func(t *testing.T) {
			_, err := ParseOptions(DefaultOptions(), tt.list)
			var oe *OptionError
			if !errors.As(err, &oe) {
				t.Fatalf("got error %v, want an *OptionError", err)
			}
			if !strings.Contains(err.Error(), tt.option) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got error %q, want one with %s and %q", err, tt.option, tt.want)
			}
			if control.ExitCode(err) != control.ExitUsage {
				t.Errorf("exit code: got %d, want %d", control.ExitCode(err), control.ExitUsage)
			}
		})
	}
}

func FuzzParseOptions(f *testing.F) {
	f.Add("rw,vers=3,acregmin=1,,=,x-y=z")
	f.Add("remoteports=192.0.2.1-192.0.2.9~::1,nconnect=2")
	f.Fuzz(func(t *testing.T, list string) {
		o, err := ParseOptions(DefaultOptions(), list)
		if err != nil {
			return
		}
		if strings.ContainsAny(o.Device, ",") {
			t.Fatalf("device: got %q, want no comma", o.Device)
		}
		if _, err := ParseOptions(DefaultOptions(), o.String()); err != nil {
			t.Fatalf("parse of %q, printed from %q: %v", o, list, err)
		}
	})
}

func TestOptionsOverrideBase(t *testing.T) {
	base, err := ParseOptions(DefaultOptions(), "soft,ro,port=7,nosuid,nodev,nosuid,noac")
	if err != nil || !slices.Equal(base.Kernel, []string{"nodev", "nosuid"}) {
		t.Fatalf("kernel flags: got %v and error %v, want nodev and nosuid", base.Kernel, err)
	}
	for _, tt := range []struct {
		list   string
		kernel []string
		noAC   bool
	}{
		{"", []string{"nodev", "nosuid"}, true},
		{"suid", []string{"nodev"}, true},
		{"suid,dev,exec,ac", []string{}, false},
		{"actimeo=7", []string{"nodev", "nosuid"}, false},
		{"acregmax=7", []string{"nodev", "nosuid"}, false},
		{"noexec", []string{"nodev", "nosuid", "noexec"}, true},
		{"noatime", []string{"nodev", "nosuid", "noatime"}, true},
	} {
		o, err := ParseOptions(base, tt.list)
		if err != nil || !slices.Equal(o.Kernel, tt.kernel) || o.NoAC != tt.noAC {
			t.Errorf("%q over nosuid,nodev,noac: got %v, noac %v, error %v; want %v, noac %v", tt.list, o.Kernel,
				o.NoAC, err, tt.kernel, tt.noAC)
		}
	}
	o, err := ParseOptions(base, "hard,rw")
	if err != nil || o.Recovery != RecoveryHard || o.ReadOnly || o.Port != 7 || len(base.Kernel) != 2 {
		t.Errorf("hard,rw over soft,ro,port=7: got %+v and error %v, want hard, rw and port 7", o, err)
	}
}

func TestParseSpec(t *testing.T) {
	for in, want := range map[string]Spec{
		"host:/":                 {"host", "/"},
		"host:/a:b":              {"host", "/a:b"},
		"192.0.2.1:/export":      {"192.0.2.1", "/export"},
		"[2001:db8::1]:/export":  {"2001:db8::1", "/export"},
		"[fe80::1%eth0]:/export": {"fe80::1%eth0", "/export"},
	} {
		got, err := ParseSpec(in)
		if err != nil || got != want || got.String() != in {
			t.Errorf("%s: got %+v (%s) and error %v, want %+v", in, got, got, err, want)
		}
	}
	for _, in := range []string{"", "host", ":/x", "host:x", "host:", "2001:db8::1:/x", "[::1:/x", "[host]:/x",
		"[::1]/x", "h ost:/x", "a/b:/x", "host:/" + strings.Repeat("x", 1024), "host:/a\nb"} {
		_, err := ParseSpec(in)
		if err == nil || control.ExitCode(err) != control.ExitUsage || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: got error %q, want a usage error of one line", in, err)
		}
	}
}
