package softiwarp

import (
	"os"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// Name is the name of the provider and of its device.
const Name = "softiwarp"

// A provider has one soft RNIC.
type provider struct {
	dev *device
}

// New makes a provider with one device. Each provider has a separate STag space.
func New(cfg Config) verbs.Provider {
	d := &device{cfg: cfg.withDefaults()}
	d.table.mu.mrs = make(map[uint32]*mr)
	return &provider{dev: d}
}

// Name returns "softiwarp".
func (p *provider) Name() string { return Name }

// A device is a soft RNIC without descriptors.
type device struct {
	cfg   Config
	table stagTable
}

// Attrs returns the limits and capabilities.
func (d *device) Attrs() verbs.DeviceAttrs {
	return verbs.DeviceAttrs{
		Name:      Name,
		Transport: verbs.TransportIWARP,
		Caps: verbs.CapFastReg | verbs.CapGaps | verbs.CapChosenIOVA | verbs.CapRegisterAny | verbs.CapRemoteInv |
			verbs.CapTerminates | verbs.CapLiveStats,
		PageSize:              os.Getpagesize(),
		MaxFastRegPageListLen: maxFRPages,
		MaxQPWR:               maxQPWR,
		MaxSendSGE:            maxSendSGE,
		MaxRecvSGE:            1,
		MaxSGERd:              1,
		MaxQPRdAtom:           maxReadDepth,
		MaxQPInitRdAtom:       maxReadDepth,
		MaxCQE:                maxCQE,
		MaxMR:                 maxMR,
	}
}

// AllocPD allocates a protection domain.
func (d *device) AllocPD() (verbs.PD, error) {
	selfcheck.Track(selfcheck.PD, 1)
	return &protectionDomain{dev: d, uses: base.Uses{Provider: Name}}, nil
}

// CreateCQ creates a completion queue and starts its dispatcher.
func (d *device) CreateCQ(depth int) (verbs.CQ, error) {
	if err := base.CheckCQDepth(Name, depth, maxCQE); err != nil {
		return nil, err
	}
	return newCQ(d, depth), nil
}

// A protectionDomain owns MRs and QPs.
type protectionDomain struct {
	dev  *device
	uses base.Uses
}

// AllocMR allocates an MR for up to depth segments with at most depth pages of memory in total.
func (p *protectionDomain) AllocMR(depth int) (verbs.MR, error) {
	if err := base.CheckMRDepth(Name, depth, maxFRPages); err != nil {
		return nil, err
	}
	if err := p.uses.Take(); err != nil {
		return nil, err
	}
	m := &mr{pd: p, depth: depth}
	m.mu.starts = make([]uint64, 0, depth)
	if err := p.dev.table.insert(m); err != nil {
		p.uses.Drop()
		return nil, err
	}
	selfcheck.Track(selfcheck.MR, 1)
	return m, nil
}

// RegMR accepts any memory, because local buffers need no key.
func (p *protectionDomain) RegMR([]byte) (verbs.MR, error) {
	if err := p.uses.Take(); err != nil {
		return nil, err
	}
	return base.NewLocalMR(&p.uses, 0), nil
}

// Dealloc releases the PD.
func (p *protectionDomain) Dealloc() error {
	if err := p.uses.End(); err != nil {
		return err
	}
	selfcheck.Track(selfcheck.PD, -1)
	return nil
}
