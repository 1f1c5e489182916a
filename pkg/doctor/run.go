package doctor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// DefaultTimeout is the default of Config.Timeout.
const DefaultTimeout = 5 * time.Second

// MaxTimeouts bounds the time of a diagnosis, in units of Config.Timeout.
const MaxTimeouts = 12

// A Config says what to diagnose.
type Config struct {
	Socket string // control socket of the daemon
	// ConfigFile is the configuration file of the daemon, and ConfigError why it cannot be used.
	// Allowed are the mounts that it allows.
	ConfigFile  string
	ConfigError error
	Allowed     mount.Allowed
	// Spec and Options are those of the mount to try. Without a Spec only this host is checked.
	Spec    *mount.Spec
	Options mount.Options
	// Write permits a scratch file in the root of the export.
	Write bool
	// Timeout bounds each step; 0 means DefaultTimeout. The diagnosis ends after MaxTimeouts of it.
	Timeout time.Duration
	// Begin and End, if not nil, are called before and after each step that is tried, and End also
	// for a step that is skipped. Run calls them from its goroutine.
	Begin func(group, name string)
	End   func(Step)
}

// A finding is what one step found.
type finding struct {
	result       Result
	text, remedy string
	lasting      bool // a failure is also reported after an interruption, which may have caused it
}

func ok(format string, args ...any) finding {
	return finding{result: OK, text: fmt.Sprintf(format, args...)}
}

func warn(remedy, format string, args ...any) finding {
	return finding{result: Warning, text: fmt.Sprintf(format, args...), remedy: remedy}
}

func skip(format string, args ...any) finding {
	return finding{result: Skipped, text: fmt.Sprintf(format, args...)}
}

// fail returns the finding for an error. Errors of this project have a remedy after a semicolon.
// remedy replaces it unless it is "".
func fail(err error, remedy string) finding {
	text, advice, _ := strings.Cut(control.OneLine(err.Error()), "; ")
	if remedy == "" {
		remedy = advice
	}
	return finding{result: Failed, text: text, remedy: remedy}
}

// add makes f a warning that includes the finding o.
func (f *finding) add(o finding) {
	f.result, f.text = Warning, f.text+"; "+o.text
	if f.remedy != "" && o.remedy != "" {
		f.remedy += "; "
	}
	f.remedy += o.remedy
}

// A step is one step of a diagnosis.
type step struct {
	name string
	// needs are the names of steps without which this one cannot be tried.
	needs []string
	// needed means that a mount fails without the step. Otherwise a failure is a warning.
	needed bool
	run    func(ctx context.Context) finding
}

// A runner runs steps and collects their outcomes.
type runner struct {
	cfg      *Config
	report   *Report
	unusable map[string]string // why a step without success did not succeed, by name of the step
	deadline context.Context   // ends with the time of the whole diagnosis
}

// Run checks this host, and tries each step of a mount of cfg.Spec. A step that fails does not stop
// the steps that do not depend on it. Run makes no mount. When ctx ends, the remaining steps are
// skipped. Whatever happens, Run has removed its scratch file, told the server that it does not use
// the export, and closed its connections when it returns.
func Run(ctx context.Context, cfg Config) *Report {
	if cfg.Timeout == 0 {
		cfg.Timeout = DefaultTimeout
	}
	began := time.Now()
	deadline, cancel := context.WithTimeout(ctx, MaxTimeouts*cfg.Timeout)
	defer cancel()
	r := &runner{cfg: &cfg, report: &Report{Version: control.Version(), Time: began}, unusable: map[string]string{},
		deadline: deadline}
	h := &host{cfg: &cfg, client: control.NewClient(cfg.Socket)}
	r.group(GroupHost, h.steps(deadline))
	if cfg.Spec != nil {
		r.report.Source, r.report.Options = cfg.Spec.String(), cfg.Options.String()
		s := newServer(&cfg)
		r.group(GroupServer, s.steps())
		s.close()
		r.report.Keys = s.keys
	}
	r.report.Seconds = time.Since(began).Seconds()
	switch {
	case ctx.Err() != nil:
		r.report.Outcome = OutcomeInterrupted
	case r.report.FirstFailure() != nil:
		r.report.Outcome = OutcomeFailed
	default:
		r.report.Outcome = OutcomeOK
	}
	return r.report
}

func (r *runner) group(name string, steps []step) {
	for i := range steps {
		r.run(name, &steps[i])
	}
}

func (r *runner) run(group string, s *step) {
	out := Step{Group: group, Name: s.name, Needed: s.needed}
	found, tried := r.reasonToSkip(s)
	if tried {
		if r.cfg.Begin != nil {
			r.cfg.Begin(group, s.name)
		}
		began := time.Now()
		ctx, cancel := context.WithTimeout(r.deadline, r.cfg.Timeout)
		found = s.run(ctx)
		cancel()
		out.Seconds = time.Since(began).Seconds()
	}
	if found.result == Failed && !found.lasting && errors.Is(r.deadline.Err(), context.Canceled) {
		found = skip("interrupted")
	}
	switch {
	case found.result == Failed:
		r.unusable[s.name] = s.name + ", which failed"
	case found.result == Skipped && r.unusable[s.name] == "":
		r.unusable[s.name] = s.name + ", which was skipped"
	}
	if found.result == Failed && !s.needed {
		found.result = Warning
	}
	out.Result, out.Text, out.Remedy = found.result, control.OneLine(found.text), control.OneLine(found.remedy)
	r.report.Steps = append(r.report.Steps, out)
	if r.cfg.End != nil {
		r.cfg.End(out)
	}
}

// reasonToSkip returns the finding for a step that cannot be tried. It reports true if the step can
// be tried.
func (r *runner) reasonToSkip(s *step) (f finding, try bool) {
	switch {
	case errors.Is(r.deadline.Err(), context.Canceled):
		return skip("interrupted"), false
	case r.deadline.Err() != nil:
		return skip("the time of the diagnosis, %v, is over; give more with --timeout",
			MaxTimeouts*r.cfg.Timeout), false
	}
	for _, name := range s.needs {
		if why := r.unusable[name]; why != "" {
			r.unusable[s.name] = why // the first cause
			return skip("needs %s", why), false
		}
	}
	return finding{}, true
}
